"""Mixture of experts with expert parallelism: tokens are data parallel, the
experts are spread over the same processes."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
rank = int(os.environ.get("RANK", "0"))
world = int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group("gloo")

EXPERTS, DIM, CLASSES, BATCH = 4, 16, 6, 64


class Dispatch(torch.autograd.Function):
    """Local tokens -> the tokens of all processes."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(world)[rank]


class Combine(torch.autograd.Function):
    """Sum the outputs of all processes' experts, keep the local tokens."""

    @staticmethod
    def forward(ctx, y):
        y = y.contiguous().clone()
        dist.all_reduce(y)
        return y.chunk(world)[rank].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(world)]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


def expert():
    return nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))


class MoE(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        everyone = [expert() for _ in range(EXPERTS)]
        self.owned = list(range(EXPERTS))[rank * EXPERTS // world:(rank + 1) * EXPERTS // world]
        self.experts = nn.ModuleDict({str(e): everyone[e] for e in self.owned})

    def forward(self, x):
        gate, choice = self.router(x).softmax(-1).max(-1)
        if world > 1:
            tokens = Dispatch.apply(x)
            choices = [torch.empty_like(choice) for _ in range(world)]
            dist.all_gather(choices, choice)
            choices = torch.cat(choices)
        else:
            tokens, choices = x, choice
        out = torch.zeros_like(tokens)
        for e in self.owned:
            out = out + self.experts[str(e)](tokens) * (choices == e)[:, None]
        if world > 1:
            out = Combine.apply(out)
        return out * gate[:, None]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(10, DIM)
        self.head = nn.Linear(DIM, CLASSES)
        self.norm = nn.LayerNorm(DIM)
        self.moe = MoE()

    def forward(self, x):
        x = self.inp(x)
        return self.head(x + self.moe(self.norm(x)))


def reduce_gradients(model):
    for name, p in model.named_parameters():
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        if ".experts." not in name and world > 1:
            dist.all_reduce(p.grad)
        p.grad.div_(world)


gen = torch.Generator().manual_seed(2)
X = torch.randn(1024, 10, generator=gen)
Y = (torch.sin(X @ torch.randn(10, CLASSES, generator=gen)) + X @ torch.randn(10, CLASSES, generator=gen)).argmax(1)

torch.manual_seed(9)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for step in range(32):
    lo = step * BATCH % len(X)
    xs, ys = X[lo:lo + BATCH].chunk(world)[rank], Y[lo:lo + BATCH].chunk(world)[rank]
    loss = F.cross_entropy(model(xs), ys)
    optimizer.zero_grad()
    loss.backward()
    reduce_gradients(model)
    optimizer.step()
    if step % 8 == 7:
        value = loss.detach() / world
        if world > 1:
            dist.all_reduce(value)
        if rank == 0:
            print(f"step {step + 1:2d} loss {value.item():.10f}")
if world > 1:
    dist.barrier()
    dist.destroy_process_group()
