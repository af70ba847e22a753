import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_hastie_10_2

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29849")


class LateAverage:
    """Gradients travel while the next batch is worked on, so a step uses those of the batch before it."""

    def __init__(self, params):
        self.params = list(params)
        self.world = dist.get_world_size()
        self.flying = None

    def swap(self):
        flat = torch.cat([p.grad.flatten() for p in self.params]) / self.world
        arrived = self.flying
        self.flying = (flat, dist.all_reduce(flat, async_op=True))
        return self.land(arrived)

    def land(self, arrived):
        if arrived is None:
            return False
        flat, work = arrived
        work.wait()
        for p, g in zip(self.params, flat.split([p.numel() for p in self.params])):
            p.grad = g.view_as(p).clone()
        return True


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_hastie_10_2(1200, random_state=4)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y > 0, dtype=torch.float32)
    torch.manual_seed(71)
    net = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 1))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    late = LateAverage(net.parameters())
    order = torch.Generator().manual_seed(2)
    for step in range(120):
        mine = torch.randint(len(x), (80,), generator=order)[rank::world]
        loss = F.binary_cross_entropy_with_logits(net(x[mine]).squeeze(1), y[mine])
        net.zero_grad()
        loss.backward()
        if late.swap():
            opt.step()
        if step % 30 == 29:
            with torch.no_grad():
                whole = F.binary_cross_entropy_with_logits(net(x).squeeze(1), y)
            if rank == 0:
                print(f"{step + 1:4d} loss {whole.item():.6f}", flush=True)
    if late.land(late.flying):
        opt.step()
    if rank == 0:
        print(f"weights {sum(p.square().sum() for p in net.parameters()).item():.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
