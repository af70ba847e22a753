"""Sparse residual blocks trained in a pipeline: all micro-batches forward, then all backward."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

WIDTH, CLASSES, BLOCKS = 16, 4, 4
BATCH, MICRO = 32, 4
SPARSITY = 0.05


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        active = F.relu(self.up(x))
        return x + self.down(active), active.mean()


class Stage(nn.Module):
    def __init__(self, blocks, head):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.head = head

    def forward(self, x):
        penalty = 0.0
        for block in self.blocks:
            x, activity = block(x)
            penalty = penalty + SPARSITY * activity
        return x, penalty


class Pipeline:
    def __init__(self, stage, rank, world):
        self.stage, self.rank, self.world = stage, rank, world
        self.first, self.last = rank == 0, rank == world - 1
        self.rows = BATCH // MICRO

    def step(self, x, y):
        held = []
        objective = torch.zeros(())
        for part, labels in zip(x.chunk(MICRO), y.chunk(MICRO)):
            if not self.first:
                part = torch.empty(self.rows, WIDTH)
                dist.recv(part, self.rank - 1)
                part.requires_grad_()
            out, penalty = self.stage(part)
            penalty = penalty / MICRO
            if self.last:
                out = F.cross_entropy(self.stage.head(out), labels) / MICRO
                objective += out.detach()
            else:
                dist.send(out.detach(), self.rank + 1)
            objective += penalty.detach()
            held.append((part, out, penalty))
        for part, out, penalty in held:
            if self.last:
                (out + penalty).backward()
            else:
                grad = torch.empty(self.rows, WIDTH)
                dist.recv(grad, self.rank + 1)
                torch.autograd.backward([out, penalty], [grad, None])
            if not self.first:
                dist.send(part.grad, self.rank - 1)
        return objective


def build(rank, world):
    torch.manual_seed(19)
    blocks = [Block() for _ in range(BLOCKS)]
    head = nn.Linear(WIDTH, CLASSES)
    per = BLOCKS // world
    return Stage(blocks[rank * per:(rank + 1) * per], head if rank == world - 1 else None)


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    pipeline = Pipeline(build(rank, world), rank, world)
    optimizer = torch.optim.AdamW(pipeline.stage.parameters(), lr=3e-3, weight_decay=1e-3)
    g = torch.Generator().manual_seed(23)
    centres = torch.randn(CLASSES, WIDTH, generator=g)

    for step in range(20):
        y = torch.randint(0, CLASSES, (BATCH,), generator=g)
        x = centres[y] + 0.9 * torch.randn(BATCH, WIDTH, generator=g)
        optimizer.zero_grad()
        objective = pipeline.step(x, y)
        optimizer.step()
        if world > 1:
            dist.all_reduce(objective)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1:2d} objective {objective.item():.8f}")

    size = sum(p.detach().square().sum() for p in pipeline.stage.parameters())
    if world > 1:
        dist.all_reduce(size)
    if rank == 0:
        print(f"weights {size.sqrt().item():.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
