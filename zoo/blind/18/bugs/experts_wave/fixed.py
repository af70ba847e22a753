"""Piecewise wave regression with a mixture of experts; experts live on different ranks, everything else everywhere."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

EXPERTS, WIDTH, BATCH = 8, 16, 64


def ranks():
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


class Collect(torch.autograd.Function):
    """rows of all ranks, in rank order"""

    @staticmethod
    def forward(ctx, x):
        rank, world = ranks()
        if world == 1:
            return x.clone()
        parts = [torch.empty_like(x) for _ in range(world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        rank, world = ranks()
        grad = grad.contiguous().clone()
        if world > 1:
            dist.all_reduce(grad)
        return grad.chunk(world)[rank]


class Deliver(torch.autograd.Function):
    """sum over ranks, each keeps its own rows"""

    @staticmethod
    def forward(ctx, x):
        rank, world = ranks()
        x = x.clone()
        if world > 1:
            dist.all_reduce(x)
        return x.chunk(world)[rank].contiguous()

    @staticmethod
    def backward(ctx, grad):
        rank, world = ranks()
        if world == 1:
            return grad
        parts = [torch.empty_like(grad) for _ in range(world)]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts)


class MoE(nn.Module):
    def __init__(self, width, count):
        super().__init__()
        rank, world = ranks()
        self.router = nn.Linear(width, count)
        made = [nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(count)]
        self.mine = range(rank * count // world, (rank + 1) * count // world)
        self.experts = nn.ModuleDict({str(e): made[e] for e in self.mine})

    def forward(self, x):
        probs = self.router(x).softmax(-1)
        top, where = probs.topk(2, -1)
        gates = torch.zeros_like(probs).scatter(1, where, top / top.sum(-1, keepdim=True))
        rows, weights = Collect.apply(x), Collect.apply(gates)
        out = torch.zeros_like(rows)
        for e in self.mine:
            out = out + weights[:, e:e + 1] * self.experts[str(e)](rows)
        return x + Deliver.apply(out)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(2, WIDTH)
        self.moe = MoE(WIDTH, EXPERTS)
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.out(self.norm(self.moe(torch.tanh(self.inp(x)))))[:, 0]


def sync_gradients(net):
    _, world = ranks()
    if world == 1:
        return
    for name, p in net.named_parameters():
        if "experts" not in name:
            dist.all_reduce(p.grad)
        p.grad.div_(world)


def waves(count, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 2, generator=gen) * 4 - 2
    y = torch.where(x[:, 0] > 0, torch.sin(3 * x[:, 1]), x[:, 1].abs() - x[:, 0])
    return x, y


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, world = ranks()
    torch.manual_seed(21)
    net = Net()
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    x, y = waves(2048, seed=4)
    x_val, y_val = waves(256, seed=5)
    picker = torch.Generator().manual_seed(6)
    for step in range(60):
        rows = torch.randint(len(x), (BATCH,), generator=picker).chunk(world)[rank]
        loss = F.mse_loss(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        sync_gradients(net)
        opt.step()
        if step % 20 == 19:
            with torch.no_grad():
                part = F.mse_loss(net(x_val.chunk(world)[rank]), y_val.chunk(world)[rank])
            if world > 1:
                dist.all_reduce(part)
            if rank == 0:
                print(f"step {step + 1}: validation error {part.item() / world:.8f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
