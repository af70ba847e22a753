import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.nn.functional import all_gather
from torch.nn.parallel import DistributedDataParallel as DDP

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29832")

BATCH, STEPS = 64, 80


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.project = nn.Linear(64, 16)

    def forward(self, a, b):
        both = self.project(self.body(torch.cat([a, b])))
        return F.normalize(both, dim=1).chunk(2)


def nt_xent(a, b, temperature=0.4):
    n = len(a)
    z = torch.cat([a, b])
    sim = z @ z.T / temperature
    sim = sim.masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
    return F.cross_entropy(sim, target)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    torch.manual_seed(9)
    net = DDP(Encoder())
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        g = torch.Generator().manual_seed(step)
        rows = torch.randperm(len(x), generator=g)[:BATCH]
        views = [x[rows] + 0.2 * torch.randn(BATCH, 64, generator=g) for _ in range(2)]
        part = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        a, b = net(views[0][part], views[1][part])
        loss = nt_xent(torch.cat(all_gather(a)), torch.cat(all_gather(b)))
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 20 == 19:
            print(f"step {step + 1} loss {loss.item():.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
