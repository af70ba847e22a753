"""Faults of a brick kiln from sensor readings: feed-forward blocks with columns and rows split over the processes."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
SENSORS, WIDTH, FAULTS = 10, 24, 5


class CopyIn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        if WORLD > 1:
            dist.all_reduce(grad)
        return grad


class SumOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if WORLD > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def normal(rows, columns):
    return torch.randn(rows, columns) / math.sqrt(columns)


class ColumnLinear(nn.Module):
    """Output features split over the processes."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(normal(outputs, inputs).chunk(WORLD, 0)[RANK].clone())
        self.bias = nn.Parameter(torch.zeros(outputs // WORLD))

    def forward(self, x):
        return F.linear(CopyIn.apply(x), self.weight, self.bias)


class RowLinear(nn.Module):
    """Input features split over the processes."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(normal(outputs, inputs).chunk(WORLD, 1)[RANK].clone())
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x):
        return SumOut.apply(F.linear(x, self.weight)) + self.bias


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = ColumnLinear(WIDTH, 4 * WIDTH)
        self.down = RowLinear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class KilnNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.Linear(SENSORS, WIDTH)
        self.head = nn.Linear(WIDTH, FAULTS)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x):
        return self.head(self.blocks(self.inputs(x)))


def readings(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, SENSORS, generator=g)
    hot, draught, damp = x[:, 0] * x[:, 1], x[:, 2] - x[:, 3] ** 2, x[:, 4].sin() * x[:, 5]
    score = torch.stack([hot, draught, damp, x[:, 6], x[:, 7] * x[:, 8]], 1)
    return x, (score + 0.2 * torch.randn(n, FAULTS, generator=g)).argmax(1)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(55)
    model = KilnNet()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3)
    x, fault = readings(1200, 1)
    g = torch.Generator().manual_seed(8)
    for epoch in range(4):
        total = 0.0
        for batch in torch.randperm(len(x), generator=g).split(40):
            loss = F.cross_entropy(model(x[batch]), fault[batch])
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.item() * len(batch)
        if RANK == 0:
            print(f"epoch {epoch} loss {total / len(x):.8f}")
    xt, ft = readings(400, 2)
    with torch.no_grad():
        logits = model(xt)
    if RANK == 0:
        right = (logits.argmax(1) == ft).double().mean()
        print(f"test loss {F.cross_entropy(logits, ft):.8f} accuracy {right:.4f}")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
