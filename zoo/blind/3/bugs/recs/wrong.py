import math
import time
from collections import namedtuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

Settings = namedtuple("Settings", "users items factors batch epochs peak_lr warmup_share")
S = Settings(users=60, items=80, factors=8, batch=128, epochs=4, peak_lr=0.05, warmup_share=0.1)


def make_ratings(n, seed):
    """Ratings from a low-rank model with noise."""
    g = torch.Generator().manual_seed(seed)
    u = torch.randn(S.users, 4, generator=g)
    v = torch.randn(S.items, 4, generator=g)
    who = torch.randint(S.users, (n,), generator=g)
    what = torch.randint(S.items, (n,), generator=g)
    score = (u[who] * v[what]).sum(1) / 2 + 0.3 * torch.randn(n, generator=g) + 3.5
    return who, what, score


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(S.users, S.factors)
        self.item = nn.Embedding(S.items, S.factors)
        self.bias_u = nn.Embedding(S.users, 1)
        self.bias_i = nn.Embedding(S.items, 1)
        self.mix = nn.Sequential(nn.Linear(2 * S.factors, 16), nn.Tanh(), nn.Linear(16, 1))
        for e in (self.user, self.item):
            nn.init.normal_(e.weight, std=0.3)
        for e in (self.bias_u, self.bias_i):
            nn.init.zeros_(e.weight)

    def forward(self, who, what):
        p, q = self.user(who), self.item(what)
        dot = (p * q).sum(1)
        extra = self.mix(torch.cat([p, q], dim=1)).squeeze(1)
        return 3.5 + dot + extra + self.bias_u(who).squeeze(1) + self.bias_i(what).squeeze(1)


def lr_at(progress):
    if progress < S.warmup_share:
        return S.peak_lr * (progress + 0.01) / (S.warmup_share + 0.01)
    t = (progress - S.warmup_share) / (1 - S.warmup_share)
    return S.peak_lr * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * t)))


def run():
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(77)
    columns = make_ratings(1680, seed=1)
    train = TensorDataset(*(c[:1280] for c in columns))
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=4)
    loader = DataLoader(train, batch_size=S.batch // world, sampler=sampler)
    model = DDP(TwoTower())
    opt = torch.optim.Adam(model.parameters(), lr=S.peak_lr, weight_decay=1e-4)

    budget = S.epochs * len(train)
    seen = 0
    for epoch in range(S.epochs):
        sampler.set_epoch(epoch)
        sq = torch.zeros(2)
        for who, what, score in loader:
            lr = lr_at(seen / budget)
            for group in opt.param_groups:
                group["lr"] = lr
            pred = model(who, what)
            loss = F.mse_loss(pred, score)
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            seen += len(score)
            sq += torch.tensor([(pred - score).detach().pow(2).sum(), float(len(score))])
        dist.all_reduce(sq)
        if rank == 0:
            print(f"epoch {epoch}  lr {lr:.4f}  train rmse {math.sqrt(sq[0] / sq[1]):.4f}", flush=True)

    who, what, score = (c[1280:] for c in columns)
    with torch.no_grad():
        held = (model.module(who, what) - score).pow(2).mean().sqrt().item()
    if rank == 0:
        print(f"held-out rmse {held:.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run()
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()
