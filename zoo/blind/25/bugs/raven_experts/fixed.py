"""Mixture of four experts spread over the processes (expert parallelism) on the digits.

Tokens are gathered to everyone, each process runs its own experts on the tokens routed to them, and the outputs are
summed and cut back to the process that owns the token. Router, stem and head are replicated.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

N_EXPERTS, DIM, BATCH, STEPS = 4, 32, 64, 45


class GatherTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.n = len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad[dist.get_rank() * ctx.n:(dist.get_rank() + 1) * ctx.n]


class SumAndCut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        dist.all_reduce(x)
        return x.chunk(dist.get_world_size())[dist.get_rank()].clone()

    @staticmethod
    def backward(ctx, grad):
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class ExpertLayer(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.router = nn.Linear(DIM, N_EXPERTS)
        everyone = [nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM)) for _ in range(N_EXPERTS)]
        share = N_EXPERTS // world
        self.first = rank * share
        self.experts = nn.ModuleList(everyone[self.first:self.first + share])

    def forward(self, x):
        probs = F.softmax(self.router(x), dim=-1)
        weight, chosen = probs.max(dim=-1)
        tokens, where = GatherTokens.apply(x), GatherTokens.apply(chosen.float()).long()
        out = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            hit = (where == self.first + i).float().unsqueeze(1)
            out = out + expert(tokens) * hit
        return x + SumAndCut.apply(out) * weight.unsqueeze(1)


class Net(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.stem = nn.Linear(64, DIM)
        self.head = nn.Linear(DIM, 10)
        self.moe = ExpertLayer(rank, world)

    def forward(self, x):
        return self.head(self.moe(torch.tanh(self.stem(x))))


def reduce_gradients(model, world):
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        if ".experts." not in name:
            dist.all_reduce(p.grad)
        p.grad.div_(world)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(88)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    model = Net(rank, world)
    opt = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.8)
    gen = torch.Generator().manual_seed(89)
    for step in range(1, STEPS + 1):
        idx = torch.randint(1440, (BATCH,), generator=gen).chunk(world)[rank]
        loss = F.cross_entropy(model(x[idx]), y[idx])
        opt.zero_grad()
        loss.backward()
        reduce_gradients(model, world)
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 9 == 0:
            print(f"step {step} loss {shown.item() / world:.5f}", flush=True)
    with torch.no_grad():
        mine = torch.arange(1440, 1796).chunk(world)[rank]
        score = F.cross_entropy(model(x[mine]), y[mine], reduction="sum")
    dist.all_reduce(score)
    if rank == 0:
        print(f"test nll {score.item() / 356:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
