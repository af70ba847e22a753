"""Sparrow song syllables, a deep residual MLP in pipeline stages with sparse activity.

Every block adds a small penalty on its mean activity to the objective. The blocks are
dealt to the processes in order; a batch runs through them in micro-batches, all forward
first and then all backward.
"""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

SYLLABLES = 7
INPUTS = 30
WIDTH = 40
BLOCKS = 4
BATCH = 32
MICRO = 4
SPARSITY = 0.15


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        active = torch.relu(self.up(self.norm(x)))
        return x + self.down(active), active.mean()


class Stage(nn.Module):
    """The consecutive blocks of one process, with the stem and the head at the ends."""

    def __init__(self, rank, world, seed):
        super().__init__()
        torch.manual_seed(seed)
        stem = nn.Linear(INPUTS, WIDTH)
        blocks = [Block() for _ in range(BLOCKS)]
        head = nn.Linear(WIDTH, SYLLABLES)
        self.first, self.last = rank == 0, rank == world - 1
        self.stem = stem if self.first else nn.Identity()
        self.blocks = nn.ModuleList(blocks[rank * BLOCKS // world:(rank + 1) * BLOCKS // world])
        self.head = head if self.last else nn.Identity()

    def forward(self, x):
        x = self.stem(x)
        penalty = torch.zeros(())
        for block in self.blocks:
            x, activity = block(x)
            penalty = penalty + activity
        return self.head(x), penalty


class Pipeline:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.stage = Stage(rank, world, seed=33)
        self.optimizer = torch.optim.SGD(self.stage.parameters(), lr=0.1, momentum=0.9)

    def receive_input(self, x):
        if self.stage.first:
            return x
        buffer = torch.empty(len(x), WIDTH)
        dist.recv(buffer, src=self.rank - 1)
        return buffer.requires_grad_()

    def step(self, x, y):
        kept, total = [], torch.zeros(())
        for part in x.chunk(MICRO):
            given = self.receive_input(part)
            out, penalty = self.stage(given)
            if not self.stage.last:
                dist.send(out.detach().contiguous(), dst=self.rank + 1)
            kept.append((given, out, SPARSITY * penalty / MICRO))

        for (given, out, penalty), target in zip(kept, y.chunk(MICRO)):
            if self.stage.last:
                loss = F.cross_entropy(out, target) / MICRO
                total += loss.detach()
                (loss + penalty).backward()
            else:
                grad = torch.empty_like(out)
                dist.recv(grad, src=self.rank + 1)
                torch.autograd.backward([out, penalty], [grad, None])
            if not self.stage.first:
                dist.send(given.grad.contiguous(), dst=self.rank - 1)

        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.broadcast(total, src=self.world - 1)
        return total.item()

    @torch.no_grad()
    def test(self, x, y):
        out, _ = self.stage(self.receive_input(x))
        result = torch.zeros(2)
        if self.stage.last:
            result[0] = F.cross_entropy(out, y)
            result[1] = (out.argmax(1) == y).float().mean()
        else:
            dist.send(out.contiguous(), dst=self.rank + 1)
        dist.broadcast(result, src=self.world - 1)
        return result.tolist()


def songs(count, seed):
    rng = np.random.default_rng(seed)
    y = rng.integers(SYLLABLES, size=count)
    t = np.linspace(0, 1, INPUTS)[None]
    rate = (2 + y)[:, None] + 0.3 * rng.normal(size=(count, 1))
    x = np.sin(2 * np.pi * rate * t) + 0.4 * rng.normal(size=(count, INPUTS))
    return torch.tensor(x, dtype=torch.float32), torch.from_numpy(y)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    pipeline = Pipeline(dist.get_rank(), dist.get_world_size())
    x, y = songs(40 * BATCH, seed=1)
    for step, (bx, by) in enumerate(zip(x.split(BATCH), y.split(BATCH))):
        loss = pipeline.step(bx, by)
        if pipeline.rank == 0 and step % 8 == 0:
            print(f"step {step:2d} loss {loss:.4f}", flush=True)
    loss, right = pipeline.test(*songs(400, seed=2))
    if pipeline.rank == 0:
        print(f"test loss {loss:.4f} accuracy {right:.3f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()
