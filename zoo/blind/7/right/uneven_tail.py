"""Wine classifier without dropping the short last batch; a process may get no rows of it at all."""
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_wine
from torch import nn

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
BATCH = 35


def shard(idx):
    per = -(-len(idx) // WORLD)
    return idx[RANK * per:(RANK + 1) * per]


def reduce_sum(t):
    if WORLD > 1:
        dist.all_reduce(t)
    return t


class Gated(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.v, self.g = nn.Linear(i, o), nn.Linear(i, o)

    def forward(self, x):
        return self.v(x) * self.g(x).sigmoid()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    d = load_wine()
    x = torch.tensor(d.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(d.target)
    n = 176

    torch.manual_seed(15)
    net = nn.Sequential(Gated(13, 24), Gated(24, 24), nn.Linear(24, 3))
    params = list(net.parameters())
    opt = torch.optim.Adam(params, lr=4e-3)
    for epoch in range(8):
        order = torch.randperm(n, generator=torch.Generator().manual_seed(30 + epoch))
        stats = torch.zeros(3, dtype=torch.float64)
        for part in order.split(BATCH):
            mine = shard(part)
            opt.zero_grad()
            if len(mine):
                out = net(x[mine])
                loss = nn.functional.cross_entropy(out, y[mine], reduction="sum")
                (loss / len(part)).backward()
                stats += torch.tensor([loss.item(), (out.argmax(1) == y[mine]).sum().item(), len(mine)])
            else:
                for p in params:
                    p.grad = torch.zeros_like(p)
            for p in params:
                reduce_sum(p.grad)
            opt.step()
        reduce_sum(stats)
        if RANK == 0:
            print(f"epoch {epoch} loss {stats[0] / stats[2]:.5f} acc {stats[1] / stats[2]:.4f} rows {int(stats[2])}")
    if WORLD > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
