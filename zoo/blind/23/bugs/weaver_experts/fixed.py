"""Weave patterns from thread counts: a mixture of experts, experts spread over processes.

Every process reads its part of the batch. The rows of all processes meet at the experts
(each process computes the ones it keeps) and the answers are summed back. Router, input
and output layers are copies, their gradients are summed over the processes.
"""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

PATTERNS = 6
FEATURES = 16
WIDTH = 32
EXPERTS = 4
CHOSEN = 2


def contiguous(t):
    return t.clone(memory_format=torch.contiguous_format)


class Meet(torch.autograd.Function):
    """Rows of all processes, in order of rank."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = contiguous(grad)
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Part(torch.autograd.Function):
    """Sum over processes, of which each gets its own rows back."""

    @staticmethod
    def forward(ctx, x):
        x = contiguous(x)
        dist.all_reduce(x)
        return x.chunk(dist.get_world_size())[dist.get_rank()]

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(F.silu(self.up(x)))


class ExpertLayer(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        everyone = [Expert() for _ in range(EXPERTS)]
        self.first = rank * EXPERTS // world
        self.experts = nn.ModuleList(everyone[self.first:(rank + 1) * EXPERTS // world])
        for expert in self.experts:
            for p in expert.parameters():
                p.kept_here = True

    def forward(self, x):
        chance, chosen = self.router(x).softmax(dim=1).topk(CHOSEN, dim=1)
        chance = chance / chance.sum(dim=1, keepdim=True)
        gate = torch.zeros(len(x), EXPERTS).scatter(1, chosen, chance)
        rows, gates = Meet.apply(x), Meet.apply(gate)
        answer = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts, start=self.first):
            answer = answer + gates[:, i:i + 1] * expert(rows)
        return x + Part.apply(answer)


class WeaveNet(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.inner = nn.Linear(FEATURES, WIDTH)
        self.mixture = ExpertLayer(rank, world)
        self.out = nn.Linear(WIDTH, PATTERNS)

    def forward(self, x):
        return self.out(self.mixture(torch.tanh(self.inner(x))))


def sum_copies(model):
    for p in model.parameters():
        if not getattr(p, "kept_here", False):
            dist.all_reduce(p.grad)


def threads(count, seed):
    rng = np.random.default_rng(seed)
    y = rng.integers(PATTERNS, size=count)
    loom = rng.integers(3, size=count)
    centres = np.random.default_rng(44).normal(size=(3, PATTERNS, FEATURES))
    x = centres[loom, y] + 0.8 * rng.normal(size=(count, FEATURES))
    return torch.tensor(x, dtype=torch.float32), torch.from_numpy(y)


def main(batch=48, steps=40):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(10)
    model = WeaveNet(rank, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.15, momentum=0.9)
    x, y = threads(batch * steps, seed=1)

    for step in range(steps):
        rows = torch.arange(step * batch, (step + 1) * batch).chunk(world)[rank]
        loss = F.cross_entropy(model(x[rows]), y[rows], reduction="sum") / batch
        optimizer.zero_grad()
        loss.backward()
        sum_copies(model)
        optimizer.step()
        if step % 8 == 0 or step == steps - 1:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step:2d} loss {total.item():.4f}", flush=True)

    x, y = (t.chunk(world)[rank] for t in threads(600, seed=2))
    with torch.no_grad():
        logits = model(x)
    result = torch.stack([F.cross_entropy(logits, y, reduction="sum"), (logits.argmax(1) == y).sum()])
    dist.all_reduce(result)
    if rank == 0:
        print(f"test loss {result[0].item() / 600:.4f} accuracy {result[1].item() / 600:.3f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
