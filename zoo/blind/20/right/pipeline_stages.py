"""Multi-step forecasting with a deep residual net cut into stages, one per process (GPipe order, send and recv by hand)."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn

WINDOW, HORIZON, WIDTH = 24, 4, 32
BATCH, MICRO, EPOCHS = 64, 4, 4
MAX_NORM = 0.5


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width)

    def forward(self, x):
        return x + self.b(torch.nn.functional.gelu(self.a(self.norm(x))))


def all_layers():
    layers = [nn.Linear(WINDOW, WIDTH)]
    layers += [Residual(WIDTH) for _ in range(6)]
    layers += [nn.Linear(WIDTH, HORIZON)]
    return layers


def series(length=1200):
    t = torch.arange(length, dtype=torch.get_default_dtype())
    noise = torch.randn(length, generator=torch.Generator().manual_seed(8))
    y = torch.sin(2 * math.pi * t / 24) + 0.5 * torch.sin(2 * math.pi * t / 7 + 1) + 0.1 * noise
    windows = y.unfold(0, WINDOW + HORIZON, 1)
    return windows[:, :WINDOW].contiguous(), windows[:, WINDOW:].contiguous()


class Stage:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.first, self.last = rank == 0, rank == world - 1
        layers = all_layers()
        per = len(layers) // world
        self.net = nn.Sequential(*layers[rank * per : (rank + 1) * per])

    def take(self, x):
        """Input of this stage: the data on the first one, else the activations of the previous one."""
        if self.first:
            return x
        h = torch.empty(len(x), WIDTH)
        dist.recv(h, src=self.rank - 1)
        return h

    def pass_on(self, h):
        if not self.last:
            dist.send(h.detach().contiguous(), dst=self.rank + 1)

    def train_step(self, x, y):
        xs, ys = x.chunk(MICRO), y.chunk(MICRO)
        stash, total = [], torch.zeros(())
        for mx, my in zip(xs, ys):
            inp = self.take(mx)
            if not self.first:
                inp.requires_grad_(True)
            out = self.net(inp)
            if self.last:
                out = (out - my).square().sum() / y.numel()
                total += out.detach()
            self.pass_on(out)
            stash.append((inp, out))
        for inp, out in stash:
            if self.last:
                out.backward()
            else:
                grad = torch.empty_like(out)
                dist.recv(grad, src=self.rank + 1)
                out.backward(grad)
            if not self.first:
                dist.send(inp.grad.contiguous(), dst=self.rank - 1)
        return total

    @torch.no_grad()
    def forward_only(self, x):
        out = self.net(self.take(x))
        self.pass_on(out)
        return out


def clip(params, world):
    square = sum(p.grad.square().sum() for p in params)
    if world > 1:
        dist.all_reduce(square)
    norm = square.sqrt()
    scale = (MAX_NORM / (norm + 1e-6)).clamp(max=1.0)
    for p in params:
        p.grad.mul_(scale)
    return norm.item()


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(4)
    stage = Stage(rank, world)
    params = list(stage.net.parameters())
    opt = torch.optim.NAdam(params, lr=3e-3)
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.2, 1.0, total_iters=8)
    x, y = series()
    n = 960
    order = torch.Generator().manual_seed(15)
    for epoch in range(EPOCHS):
        report = torch.zeros(2)
        norm = 0.0
        for rows in torch.randperm(n, generator=order).split(BATCH):
            opt.zero_grad()
            report[0] += stage.train_step(x[rows], y[rows]) / (n // BATCH)
            norm = clip(params, world)
            opt.step()
            warm.step()
        pred = stage.forward_only(x[n + WINDOW + HORIZON :])
        if stage.last:
            report[1] = (pred - y[n + WINDOW + HORIZON :]).abs().mean()
        if world > 1:
            dist.broadcast(report, src=world - 1)
        if rank == 0:
            print(f"epoch {epoch}: loss {report[0]:.6f}  test mae {report[1]:.6f}  last norm {norm:.5f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
