"""Residual regression network cut into stages; micro-batches travel from rank to rank."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

DIM, BLOCKS, MICRO, MICRO_SIZE, STEPS = 20, 4, 4, 12, 15


class Res(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.a, self.b = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        return x + self.b(torch.tanh(self.a(self.norm(x))))


class Stage(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x):
        for layer in self.layers.values():
            x = layer(x)
        return x


def cut(rank, world):
    torch.manual_seed(6)
    whole = [nn.Linear(8, DIM)] + [Res() for _ in range(BLOCKS)] + [nn.Linear(DIM, 1)]
    per = BLOCKS // world
    keep = list(range(1 + rank * per, 1 + (rank + 1) * per))
    if rank == 0:
        keep = [0] + keep
    if rank == world - 1:
        keep = keep + [len(whole) - 1]
    return Stage({str(i): whole[i] for i in keep})


class Pipe:
    def __init__(self, stage, rank, world):
        self.stage, self.rank, self.world = stage, rank, world
        self.first, self.last = rank == 0, rank == world - 1

    def receive(self, rows, source):
        buf = torch.empty(rows, DIM)
        dist.recv(buf, source)
        return buf

    def forward(self, x):
        if not self.first:
            x = self.receive(len(x), self.rank - 1).requires_grad_(torch.is_grad_enabled())
        out = self.stage(x)
        if not self.last:
            dist.send(out.detach(), self.rank + 1)
        return x, out

    def step(self, xs, ys):
        saved = [self.forward(x) for x in xs]
        total = torch.zeros(())
        for (inp, out), y in zip(reversed(saved), reversed(ys)):
            if self.last:
                loss = (out.squeeze(1) - y).square().mean() / len(xs)
                loss.backward()
                total += loss.detach()
            else:
                out.backward(self.receive(len(out), self.rank + 1))
            if not self.first:
                dist.send(inp.grad, self.rank - 1)
        if self.world > 1:
            dist.broadcast(total, self.world - 1)
        return total


def clip(params, limit, world):
    square = sum(p.grad.square().sum() for p in params)
    if world > 1:
        dist.all_reduce(square)
    norm = square.sqrt()
    if norm > limit:
        for p in params:
            p.grad.mul_(limit / norm)
    return norm


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    g = torch.Generator().manual_seed(1)
    x = torch.randn(600, 8, generator=g)
    y = (x[:, :3].prod(1) + torch.sin(2 * x[:, 4]) + 0.1 * torch.randn(600, generator=g))
    stage = cut(rank, world)
    params = list(stage.parameters())
    opt = torch.optim.Adam(params, lr=4e-3)
    pipe = Pipe(stage, rank, world)
    rows = MICRO * MICRO_SIZE

    for step in range(STEPS):
        ids = torch.randint(0, 500, (rows,), generator=g)
        loss = pipe.step(x[ids].split(MICRO_SIZE), y[ids].split(MICRO_SIZE))
        norm = clip(params, 1.0, world)
        opt.step()
        opt.zero_grad()
        if rank == 0 and step % 4 == 0:
            print(f"step {step} loss {loss:.5f} norm {norm:.4f}")

    with torch.no_grad():
        _, out = pipe.forward(x[500:])
        error = (out.squeeze(1) - y[500:]).abs().mean() if pipe.last else torch.zeros(())
    if world > 1:
        dist.broadcast(error, world - 1)
    if rank == 0:
        print(f"validation mae {error:.5f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
