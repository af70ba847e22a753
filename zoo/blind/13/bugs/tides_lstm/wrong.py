"""Forecast the next water level from the last two days of a tide gauge."""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

HOURS, WINDOW, BATCH, EPOCHS, LR, LIMIT = 600, 24, 48, 4, 0.3, 0.01


class Forecaster(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.lstm = nn.LSTM(1, width, batch_first=True)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1]).squeeze(1)


def gauge():
    g = torch.Generator().manual_seed(8)
    t = torch.arange(HOURS)
    level = torch.sin(2 * math.pi * t / 12.42) + 0.4 * torch.sin(2 * math.pi * t / 23.93 + 1)
    storms = (torch.rand(HOURS, generator=g) < 0.04) * 2.0 * torch.rand(HOURS, generator=g)
    level = level + storms + 0.05 * torch.randn(HOURS, generator=g)
    x = level.unfold(0, WINDOW + 1, 1)
    return x[:, :-1, None].contiguous(), x[:, -1].contiguous()


def main():
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    x, y = gauge()
    x, y = x[:len(x) // BATCH * BATCH], y[:len(y) // BATCH * BATCH]

    net = Forecaster()
    for p in net.parameters():
        p.register_hook(lambda g: g.clamp(-LIMIT, LIMIT))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.8)

    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(())
        for rows in order.split(BATCH):
            rows = rows[rank::world]
            loss = ((model(x[rows]) - y[rows]) ** 2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach() * len(rows)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} squared error {total.item() / len(x):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
