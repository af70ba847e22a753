"""Mixture of experts for station weather; the router is balanced by a bias instead of a loss."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

EXPERTS, INPUTS, WIDTH = 4, 9, 20
GLOBAL_BATCH, STEPS = 48, 40


class BalancedMoE(nn.Module):
    def __init__(self, rate=0.02):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 32), nn.SiLU(), nn.Linear(32, WIDTH)) for _ in range(EXPERTS)]
        )
        self.register_buffer("bias", torch.zeros(EXPERTS))
        self.rate = rate
        self.load = None

    def forward(self, x):
        score = torch.sigmoid(self.router(x))
        chosen = (score + self.bias).topk(2, dim=1).indices
        picked = torch.zeros_like(score).scatter(1, chosen, 1.0)
        self.load = picked.detach().sum(0)
        gate = score * picked
        gate = gate / gate.sum(1, keepdim=True)
        return sum(gate[:, e, None] * expert(x) for e, expert in enumerate(self.experts))

    @torch.no_grad()
    def rebalance(self):
        load = self.load
        dist.all_reduce(load)
        self.bias += self.rate * torch.sign(load.mean() - load)
        self.bias -= self.bias.mean()


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.inlet = nn.Linear(INPUTS, WIDTH)
        self.moe = BalancedMoE()
        self.outlet = nn.Linear(WIDTH, 2)

    def forward(self, x):
        h = F.silu(self.inlet(x))
        return self.outlet(h + self.moe(h))


def make_stations(n=960):
    g = torch.Generator().manual_seed(29)
    x = torch.randn(n, INPUTS, generator=g)
    regime = (x[:, 0] > 0).long() * 2 + (x[:, 1] > 0.8).long()
    mixing = torch.randn(4, INPUTS, 2, generator=g)
    y = torch.einsum("ni,nio->no", x, mixing[regime]) + 0.1 * torch.randn(n, 2, generator=g)
    return x, y


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_stations()
    torch.manual_seed(0)
    model = Forecaster()
    ddp = DDP(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=4e-3)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))

    for step in range(STEPS):
        at = step * GLOBAL_BATCH % len(x)
        ids = order[at : at + GLOBAL_BATCH].chunk(world)[rank]
        loss = F.mse_loss(ddp(x[ids]), y[ids])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.moe.rebalance()
        if step % 10 == 9:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                bias = [round(v, 4) for v in model.moe.bias.tolist()]
                print(f"step {step + 1} loss {shown.item() / world:.8f} bias {bias}")

    if rank == 0:
        print(f"weight norm {sum(p.detach().square().sum() for p in model.parameters()).item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
