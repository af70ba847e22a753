"""Each rank keeps the optimizer state of its share of the tensors; the run is continued from a checkpoint."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_breast_cancer


class PartitionedAdam:
    def __init__(self, named, lr, betas=(0.9, 0.99), eps=1e-8):
        self.named = dict(named)
        self.lr, self.betas, self.eps = lr, betas, eps
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        names = sorted(self.named, key=lambda n: (-self.named[n].numel(), n))
        self.owner = {n: i % self.world for i, n in enumerate(names)}
        self.state = {n: {"t": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)}
                      for n, p in self.named.items() if self.owner[n] == self.rank}

    @torch.no_grad()
    def step(self):
        b1, b2 = self.betas
        for n, p in self.named.items():
            dist.all_reduce(p.grad)
            p.grad.div_(self.world)
            if n in self.state:
                s = self.state[n]
                s["t"] += 1
                s["m"].lerp_(p.grad, 1 - b1)
                s["v"].lerp_(p.grad.square(), 1 - b2)
                m = s["m"] / (1 - b1 ** s["t"])
                v = s["v"] / (1 - b2 ** s["t"])
                p.sub_(self.lr * m / (v.sqrt() + self.eps))
            dist.broadcast(p.data, self.owner[n])
            p.grad = None

    def state_dict(self):
        return dict(self.state)

    def load_state_dict(self, saved):
        for n in self.state:
            if n in saved:
                self.state[n] = {k: v.clone() if torch.is_tensor(v) else v for k, v in saved[n].items()}


def make():
    torch.manual_seed(12)
    net = nn.Sequential(nn.Linear(30, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 1))
    return net, PartitionedAdam(net.named_parameters(), lr=4e-3)


def fit(net, opt, x, y, steps, gen):
    rank, world = dist.get_rank(), dist.get_world_size()
    for _ in range(steps):
        idx = torch.randint(len(x), (64,), generator=gen)[rank::world]
        nn.functional.binary_cross_entropy_with_logits(net(x[idx]).squeeze(1), y[idx]).backward()
        opt.step()


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    data = load_breast_cancer()
    x = torch.tensor(data.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(data.target, dtype=torch.float32)
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    file = os.path.join(folder[0], "ckpt.pt")
    gen = torch.Generator().manual_seed(77)

    net, opt = make()
    fit(net, opt, x, y, 20, gen)
    blob = {"net": net.state_dict(), "opt": opt.state_dict(), "gen": gen.get_state()}
    if rank == 0:
        torch.save(blob, file)
    dist.barrier()

    net, opt = make()
    blob = torch.load(file)
    net.load_state_dict(blob["net"])
    opt.load_state_dict(blob["opt"])
    gen = torch.Generator()
    gen.set_state(blob["gen"])
    for part in range(3):
        fit(net, opt, x, y, 8, gen)
        with torch.no_grad():
            loss = nn.functional.binary_cross_entropy_with_logits(net(x).squeeze(1), y)
        if rank == 0:
            print(f"part {part}: {loss.item():.6f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29591").items():
        os.environ.setdefault(k, v)
    main()
