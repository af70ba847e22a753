"""Next-hour water level from long gauge records; each rank works on one stretch of time."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

HOURS, GAUGES, SERIES = 96, 3, 12
rank = int(os.environ.get("RANK", 0))
world = int(os.environ.get("WORLD_SIZE", 1))


def shift(t, by):
    """What rank - by holds; zeros where there is no such rank."""
    if world == 1:
        return torch.zeros_like(t)
    parts = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(parts, t.contiguous())
    source = rank - by
    return parts[source] if 0 <= source < world else torch.zeros_like(t)


class Halo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, by):
        ctx.by = by
        return shift(t, by)

    @staticmethod
    def backward(ctx, grad):
        return shift(grad, -ctx.by), None


class CausalConv(nn.Module):
    def __init__(self, inputs, outputs, size, dilation):
        super().__init__()
        self.reach = (size - 1) * dilation
        self.conv = nn.Conv1d(inputs, outputs, size, dilation=dilation)

    def forward(self, x):
        before = Halo.apply(x[..., -self.reach:].contiguous(), 1)
        return self.conv(torch.cat([before, x], dim=-1))


class GaugeNet(nn.Module):
    def __init__(self, width=10):
        super().__init__()
        self.first = CausalConv(GAUGES, width, 3, 1)
        self.layers = nn.ModuleList(CausalConv(width, width, 3, d) for d in (2, 4, 8))
        self.out = nn.Conv1d(width, GAUGES, 1)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.out(h)


def records():
    g = torch.Generator().manual_seed(17)
    rain = torch.rand(SERIES, GAUGES, HOURS + 1, generator=g)
    rain = torch.where(rain > 0.8, rain, torch.zeros_like(rain))
    level = torch.zeros(SERIES, GAUGES)
    rows = []
    for hour in range(HOURS + 1):
        upstream = torch.cat([torch.zeros(SERIES, 1), level[:, :-1]], 1)
        level = 0.7 * level + 0.25 * upstream + rain[..., hour]
        rows.append(level)
    return torch.stack(rows, -1)


def main():
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(6)
    levels = records()
    stretch = slice(rank * HOURS // world, (rank + 1) * HOURS // world)
    inputs = levels[..., :-1][..., stretch]
    targets = levels[..., 1:][..., stretch]
    net = GaugeNet()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    batch = 4

    for epoch in range(6):
        total = 0.0
        for first in range(0, SERIES, batch):
            x, y = inputs[first:first + batch], targets[first:first + batch]
            loss = (net(x) - y).square().sum() / (batch * GAUGES * HOURS)
            optimizer.zero_grad()
            loss.backward()
            summed = loss.detach().clone()
            if world > 1:
                for p in net.parameters():
                    dist.all_reduce(p.grad)
                dist.all_reduce(summed)
            nn.utils.clip_grad_norm_(net.parameters(), 2.0)
            optimizer.step()
            total += summed.item()
        if rank == 0:
            print(f"epoch {epoch}: squared error {total * batch / SERIES:.9f}")

    if rank == 0:
        print(f"first filter norm {net.first.conv.weight.norm().item():.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
