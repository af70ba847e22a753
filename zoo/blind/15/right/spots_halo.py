"""A convolutional emulator of a reaction-diffusion system, parallel over space: every process holds a strip of every
field and exchanges the border rows with its neighbours before each convolution. All processes read the same fields.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

SIZE, BATCH, EPOCHS = 16, 8, 5


def trade(to_above, to_below, rank, world):
    """Send one row up and one down, get one from above and one from below (zeros beyond the edge of the field)."""
    above, below, work = torch.zeros_like(to_above), torch.zeros_like(to_below), []
    for peer, outgoing, incoming in ((rank - 1, to_above, above), (rank + 1, to_below, below)):
        if 0 <= peer < world:
            work += [dist.isend(outgoing.contiguous(), peer), dist.irecv(incoming, peer)]
    for w in work:
        w.wait()
    return above, below


class Halo(torch.autograd.Function):
    """Strip with a row of either neighbour; backward hands the gradient of these rows back to them."""

    @staticmethod
    def forward(ctx, x, rank, world):
        ctx.place = rank, world
        above, below = trade(x[:, :, :1], x[:, :, -1:], rank, world)
        return torch.cat([above, x, below], 2)

    @staticmethod
    def backward(ctx, g):
        above, below = trade(g[:, :, :1], g[:, :, -1:], *ctx.place)
        grad = g[:, :, 1:-1].clone()
        grad[:, :, :1] += above
        grad[:, :, -1:] += below
        return grad, None, None


class StripConv(nn.Conv2d):
    def __init__(self, cin, cout, rank, world):
        super().__init__(cin, cout, 3)
        self.place = rank, world

    def forward(self, x):
        x = Halo.apply(x, *self.place)
        return super().forward(F.pad(x, (1, 1, 0, 0), mode="circular"))        # the field is closed in the other direction


class Emulator(nn.Module):
    def __init__(self, rank, world, width=12):
        super().__init__()
        self.one, self.two = StripConv(2, width, rank, world), StripConv(width, width, rank, world)
        self.out = StripConv(width, 2, rank, world)

    def forward(self, x):
        h = F.gelu(self.one(x))
        return x + 0.1 * self.out(F.gelu(self.two(h)) + h)


def fields(n, seed):
    """Pairs of a field of two substances and the field ten steps later."""
    g = torch.Generator().manual_seed(seed)
    u = F.interpolate(torch.rand(n, 2, 6, 6, generator=g), SIZE, mode="bicubic")
    start = u
    for _ in range(10):
        lap = F.conv2d(F.pad(F.pad(u, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1)),
                       torch.tensor([[0, 1, 0], [1, -4, 1], [0, 1, 0.0]]).repeat(2, 1, 1, 1), groups=2)
        a, b = u.unbind(1)
        react = torch.stack([-a * b * b + 0.04 * (1 - a), a * b * b - 0.1 * b], 1)
        u = u + 0.5 * (torch.tensor([0.16, 0.08]).view(2, 1, 1) * lap + react)
    return start, u


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(9)
    rows = SIZE // world
    strip = slice(rank * rows, (rank + 1) * rows)
    train = TensorDataset(*(t[:, :, strip] for t in fields(64, 1)))
    test = [t[:, :, strip] for t in fields(21, 2)]
    loader = DataLoader(train, BATCH, shuffle=True, generator=torch.Generator().manual_seed(77))      # same order everywhere

    model = Emulator(rank, world)
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, eps=1e-6)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.75)
    for epoch in range(EPOCHS):
        report = torch.zeros(2, dtype=torch.float64)
        for x, y in loader:
            loss = 100 * (model(x) - y).square().sum() / (len(x) * 2 * SIZE * SIZE)     # of this strip
            optimizer.zero_grad()
            loss.backward()
            if world > 1:
                flat = torch.cat([p.grad.flatten() for p in model.parameters()])
                dist.all_reduce(flat)                                                   # strips add up
                for p, g in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()])):
                    p.grad.copy_(g.view_as(p))
            optimizer.step()
            report[0] += loss.item() / len(loader)
        schedule.step()
        with torch.no_grad():
            report[1] = 100 * (model(test[0]) - test[1]).square().sum().item() / (len(test[0]) * 2 * SIZE * SIZE)
        if world > 1:
            dist.all_reduce(report)
        if rank == 0:
            print(f"epoch {epoch} train {report[0]:.5f} test {report[1]:.5f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
