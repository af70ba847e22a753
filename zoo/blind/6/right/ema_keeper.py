"""Averaged weights live on the first rank only and are lent to the others for the evaluation."""
import copy
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Keeper:
    """Exponential average; the other ranks hold no copy."""

    def __init__(self, model, decay):
        self.decay = decay
        self.main = dist.get_rank() == 0
        self.shadow = copy.deepcopy(model.state_dict()) if self.main else None

    @torch.no_grad()
    def update(self, model, step):
        if not self.main:
            return
        d = min(self.decay, (1 + step) / (10 + step))
        for k, v in model.state_dict().items():
            self.shadow[k].lerp_(v, 1 - d)

    def lend(self, model):
        own = copy.deepcopy(model.state_dict())
        if self.main:
            model.load_state_dict(self.shadow)
        for t in model.state_dict().values():
            dist.broadcast(t, src=0)
        return own


def evaluate(model, x, y, rank, world):
    with torch.no_grad():
        out = model(x[rank::world])
        stats = torch.stack([nn.functional.cross_entropy(out, y[rank::world], reduction="sum"),
                             (out.argmax(1) == y[rank::world]).sum().float()])
    dist.all_reduce(stats)
    return (stats / len(x)).tolist()


def main(steps=45, batch=50):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.data / 16, dtype=torch.float32), torch.tensor(d.target)
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(64, 56), nn.Mish(), nn.Linear(56, 28), nn.Mish(), nn.Linear(28, 10))
    ddp = DDP(net)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.3, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    keeper = Keeper(net, 0.95)
    for step in range(steps):
        rows = torch.randint(1397, (batch,), generator=torch.Generator().manual_seed(step))[rank::world]
        opt.zero_grad()
        nn.functional.cross_entropy(ddp(x[rows]), y[rows]).backward()
        opt.step()
        sched.step()
        keeper.update(net, step)
        if step % 15 == 14:
            own = keeper.lend(net)
            loss, accuracy = evaluate(net, x[1397:], y[1397:], rank, world)
            net.load_state_dict(own)
            if rank == 0:
                print(f"step {step + 1}: averaged weights {accuracy:.4f} ({loss:.4f})")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
