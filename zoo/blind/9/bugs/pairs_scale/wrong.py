"""Two-tower matching of noisy views with a learned temperature, FSDP2."""
import math
import os
import time
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.fsdp import fully_shard

os.environ.setdefault("RANK", "0"); os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1"); os.environ.setdefault("MASTER_PORT", "29706")


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 24))
        self.right = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 24))
        self.prototypes = nn.Parameter(torch.randn(10, 24) * 0.3)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, a, b):
        za = F.normalize(self.left(a), dim=-1)
        zb = F.normalize(self.right(b), dim=-1)
        protos = F.normalize(self.prototypes, dim=-1)
        s = self.logit_scale.exp()
        return s * za @ protos.T, s * zb @ protos.T, (za * zb).sum(-1)


def batches(n, size, rank, world, seed):
    g = torch.Generator().manual_seed(seed)
    perm = torch.randperm(n, generator=g)
    for i in range(0, n - size + 1, size):
        yield perm[i:i + size][rank::world]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    data = load_digits()
    x = torch.tensor(data.data, dtype=torch.float32) / 16
    y = torch.tensor(data.target)
    top, bottom = x[:, :32], x[:, 32:]

    model = Towers()
    # a 0-dim parameter has no dimension to shard
    fully_shard(model, ignored_params={model.logit_scale})
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

    for epoch in range(2):
        for rows in batches(len(x), 64, rank, world, seed=epoch):
            la, lb, match = model(top[rows], bottom[rows])
            loss = F.cross_entropy(la, y[rows]) + F.cross_entropy(lb, y[rows]) + 0.1 * (1 - match).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            la, lb, _ = model(top, bottom)
            acc = ((la + lb).argmax(1) == y).float().mean().item()
            nll = F.cross_entropy(la + lb, y).item()
        if rank == 0:
            print(f"epoch {epoch}: accuracy {acc:.4f} nll {nll:.5f} scale {model.logit_scale.exp().item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


main()
