"""Soft mixture of eight experts, the experts spread over the ranks; every rank sees the whole batch."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

EXPERTS, WIDTH, HIDDEN, BATCH = 8, 12, 16, 32


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


class Spread(torch.autograd.Function):
    """Same values forward, sum of the ranks' gradients backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if world_size() > 1:
            dist.all_reduce(grad)
        return grad


class Combine(torch.autograd.Function):
    """Sum of the ranks' values forward, same gradient backward."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        if world_size() > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class ExpertBank(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.count = EXPERTS // world
        self.first = rank * self.count
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.inner = nn.Parameter(torch.empty(self.count, WIDTH, HIDDEN))
        self.outer = nn.Parameter(torch.empty(self.count, HIDDEN, WIDTH))
        self.reset_experts()

    @torch.no_grad()
    def reset_experts(self):
        for i in range(self.count):
            g = torch.Generator().manual_seed(900 + self.first + i)
            self.inner[i].normal_(0.0, WIDTH ** -0.5, generator=g)
            self.outer[i].normal_(0.0, HIDDEN ** -0.5, generator=g)

    def forward(self, x):
        gates = Spread.apply(self.gate(x).softmax(-1))[:, self.first:self.first + self.count]
        h = torch.tanh(torch.einsum("bw,ewh->beh", Spread.apply(x), self.inner))
        y = torch.einsum("beh,ehw,be->bw", h, self.outer, gates)
        return x + Combine.apply(y)


class Model(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.enter = nn.Linear(5, WIDTH)
        self.bank = ExpertBank(rank, world)
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.leave(self.bank(torch.tanh(self.enter(x))))


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(16)
    model = Model(rank, world)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 12, gamma=0.5)
    g = torch.Generator().manual_seed(90)
    rule = torch.randn(5, 3, generator=g)

    for step in range(36):
        x = torch.randn(BATCH, 5, generator=g)
        y = ((x.abs() - 0.5) @ rule).argmax(1)
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if rank == 0 and step % 6 == 5:
            print(f"step {step + 1:2d} loss {loss.item():.8f}")

    bank = torch.stack([model.bank.inner.detach().square().sum(), model.bank.outer.detach().square().sum()])
    if world > 1:
        dist.all_reduce(bank)
    if rank == 0:
        print(f"gate norm {model.bank.gate.weight.norm().item():.10f}  bank norm {bank.sum().sqrt().item():.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
