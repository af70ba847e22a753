"""Demand of bakery branches: a recurrent forecaster with averaged weights, error reported while the months go by."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.set_default_dtype(torch.float64)
BRANCHES, DAYS, HISTORY, MONTHS = 64, 240, 14, 4
rank = int(os.environ.get("RANK", 0))
world = int(os.environ.get("WORLD_SIZE", 1))


class RelativeError:
    """Sum of absolute errors over the sum of sales, over all processes."""

    def __init__(self):
        self.state = torch.zeros(2)

    def update(self, forecast, sales):
        self.state += torch.stack([(forecast - sales).abs().sum(), sales.sum()])

    def compute(self):
        state = self.state
        if world > 1:
            dist.all_reduce(state)
        return (state[0] / state[1]).item()


class Forecaster(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.gru = nn.GRU(2, width, batch_first=True)
        self.out = nn.Linear(width, 1)

    def forward(self, sales, weekday):
        angle = weekday * (2 * torch.pi / 7)
        states, _ = self.gru(torch.stack([sales - 1, angle.sin()], -1))
        return sales[:, -1] + self.out(states[:, -1]).squeeze(1)


def bakeries():
    g = torch.Generator().manual_seed(44)
    day = torch.arange(DAYS).double()
    level = 0.7 + 0.6 * torch.rand(BRANCHES, 1, generator=g)
    phase = torch.rand(BRANCHES, 1, generator=g) * 0.8
    week = 0.3 * torch.sin(day[None] * (2 * torch.pi / 7) + phase)
    noise = torch.randn(BRANCHES, DAYS, generator=g) * (0.02 + 0.16 * (day / DAYS) ** 3)
    return level + week + noise


def window(sales, branch, end):
    days = end[:, None] - HISTORY + torch.arange(HISTORY)
    return sales[branch[:, None], days], (days % 7).double(), sales[branch, end]


def train(model, average, sales):
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    g = torch.Generator().manual_seed(1)
    for step in range(80):
        branch = torch.randint(0, BRANCHES, (64,), generator=g).chunk(world)[rank]
        end = torch.randint(HISTORY, 120, (64,), generator=g).chunk(world)[rank]
        past, weekday, wanted = window(sales, branch, end)
        loss = F.l1_loss(model(past, weekday), wanted)
        opt.zero_grad()
        loss.backward()
        if world > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
        opt.step()
        average.update_parameters(model)


@torch.no_grad()
def evaluate(model, sales):
    error = RelativeError()
    branch = torch.arange(rank, BRANCHES, world)
    start = 120
    so_far = []
    for month in range(MONTHS):
        for day in range(start + 30 * month, start + 30 * (month + 1)):
            past, weekday, wanted = window(sales, branch, torch.full_like(branch, day))
            error.update(model(past, weekday), wanted)
        so_far.append(error.compute())
    return so_far


def main():
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(6)
    model = Forecaster()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    sales = bakeries()
    train(model, average, sales)
    for name, net in (("last", model), ("averaged", average)):
        so_far = evaluate(net, sales)
        if rank == 0:
            print(f"{name} weights, error after each month " + " ".join(f"{e:.6f}" for e in so_far))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
