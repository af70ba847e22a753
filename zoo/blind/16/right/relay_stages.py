"""A residual net with tied in- and output matrix, cut into as many stages as there are processes.

GPipe order: four micro-batches forward, then four backward.
"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

BLOCKS, WIDTH, VOCAB, CONTEXT, BATCH, MICRO, STEPS = 8, 24, 29, 4, 32, 4, 18


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Stage(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        table = nn.Embedding(VOCAB, WIDTH)
        blocks = [Block() for _ in range(BLOCKS)]
        fold = nn.Linear(CONTEXT * WIDTH, WIDTH)
        norm = nn.LayerNorm(WIDTH)
        cut = BLOCKS // world
        self.blocks = nn.Sequential(*blocks[rank * cut:(rank + 1) * cut])
        self.first, self.last = rank == 0, rank == world - 1
        if self.first or self.last:
            self.table = table
        if self.first:
            self.fold = fold
        if self.last:
            self.norm = norm

    def forward(self, x):
        if self.first:
            x = self.fold(self.table(x).flatten(1))
        x = self.blocks(x)
        return F.linear(self.norm(x), self.table.weight) if self.last else x


def windows(g):
    """Next symbol of a noisy second-order rule."""
    x = torch.randint(0, VOCAB, (BATCH, CONTEXT), generator=g)
    y = (3 * x[:, -1] + x[:, -3]) % VOCAB
    noisy = torch.rand(BATCH, generator=g) < 0.1
    return x, torch.where(noisy, x[:, 0], y)


def main():
    alone = "RANK" not in os.environ
    if not alone:
        dist.init_process_group("gloo")
    rank = 0 if alone else dist.get_rank()
    world = 1 if alone else dist.get_world_size()
    ends = dist.new_group([0, world - 1]) if world > 1 else None

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(19)
    stage = Stage(rank, world)
    opt = torch.optim.Adam(stage.parameters(), lr=4e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    g = torch.Generator().manual_seed(55)

    for step in range(STEPS):
        x, y = windows(g)
        kept, total = [], torch.zeros(())
        for part, target in zip(x.chunk(MICRO), y.chunk(MICRO)):
            if not stage.first:
                part = torch.empty(BATCH // MICRO, WIDTH)
                dist.recv(part, rank - 1)
                part.requires_grad_()
            out = stage(part)
            if stage.last:
                out = F.cross_entropy(out, target) / MICRO
                total += out.detach()
            else:
                dist.send(out.detach(), rank + 1)
            kept.append((part, out))

        opt.zero_grad()
        for part, out in kept:
            if stage.last:
                out.backward()
            else:
                back = torch.empty_like(out)
                dist.recv(back, rank + 1)
                out.backward(back)
            if not stage.first:
                dist.send(part.grad, rank - 1)

        if world > 1 and (stage.first or stage.last):
            dist.all_reduce(stage.table.weight.grad, group=ends)
        square = torch.zeros(())
        for name, p in stage.named_parameters():
            if name != "table.weight" or stage.first:
                square += p.grad.pow(2).sum()
        if world > 1:
            dist.all_reduce(square)
            dist.broadcast(total, world - 1)
        norm = square.sqrt()
        for p in stage.parameters():
            p.grad.mul_((0.5 / (norm + 1e-6)).clamp(max=1.0))
        opt.step()
        sched.step()
        if rank == 0 and step % 6 == 5:
            print(f"step {step + 1}: loss {total:.10f} gradient {norm:.10f}")

    if world > 1:
        weights = torch.stack([p.detach().pow(2).sum() for n, p in stage.named_parameters()
                               if n != "table.weight" or stage.first]).sum()
        dist.all_reduce(weights)
    else:
        weights = torch.stack([p.detach().pow(2).sum() for p in stage.parameters()]).sum()
    if rank == 0:
        print(f"squared weights {weights:.10f}")
    if not alone:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
