"""A switch layer with four experts and a load-balancing term, for a piecewise regression."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

EXPERTS = 4
BALANCE = 0.5


def across_ranks(t):
    t = t.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(t)
        t /= dist.get_world_size()
    return t


class Switch(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
            for _ in range(EXPERTS)
        )
        self.usage = None

    def forward(self, x):
        probabilities = self.router(x).softmax(-1)
        weight, chosen = probabilities.max(-1)
        picked = nn.functional.one_hot(chosen, EXPERTS).to(x.dtype)
        outputs = torch.stack([expert(x) for expert in self.experts], dim=-1)
        y = (outputs * (picked * weight[:, None])[:, None, :]).sum(-1)
        load = picked.mean(0)
        self.usage = across_ranks(load)
        balance = EXPERTS * (load * probabilities.mean(0)).sum()
        return x + y, balance


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.lift = nn.Linear(6, width)
        self.switch = Switch(width)
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        h, balance = self.switch(torch.tanh(self.lift(x)))
        return self.out(self.norm(h)).squeeze(-1), balance


def dataset(n=512):
    g = torch.Generator().manual_seed(21)
    x = torch.randn(n, 6, generator=g)
    region = (x[:, 0] > 0.4).long() * 2 + (x[:, 1] > 0.4).long()
    slopes = torch.randn(4, 6, generator=g)
    y = (x * slopes[region]).sum(1) + 0.05 * torch.randn(n, generator=g)
    return x, y


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    rank, world = 0, 1
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    net = Net()
    model = DistributedDataParallel(net) if world > 1 else net
    x, y = dataset()
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
    batch = 32
    for epoch in range(5):
        shuffled = torch.randperm(len(x), generator=torch.Generator().manual_seed(100 + epoch))
        sums = torch.zeros(2)
        for rows in shuffled.split(batch):
            mine = rows[rank * batch // world:(rank + 1) * batch // world]
            prediction, balance = model(x[mine])
            error = (prediction - y[mine]).square().mean()
            optimizer.zero_grad()
            (error + BALANCE * balance).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            sums += torch.stack([error.detach(), balance.detach()])
        sums = across_ranks(sums) * batch / len(x)
        if rank == 0:
            usage = " ".join(f"{u:.3f}" for u in net.switch.usage.tolist())
            print(f"epoch {epoch} error {sums[0]:.8f} balance {sums[1]:.8f} usage {usage}")
    if rank == 0:
        print(f"router norm {net.switch.router.weight.norm().item():.10f}")
    if dist.is_initialized():
        dist.destroy_process_group()
