"""Tensor-parallel transformer with QK norm learns (a + b) mod 17 and (a * b) mod 17.

Attention heads and the gated MLP are split with DTensor's parallelize_module. The norms
of queries and keys have one weight for all heads, but a process sees its own heads
only, so their gradients are added up; all other plain parameters get whole gradients.
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

MOD, WIDTH, HEADS, SIZE, STEPS, BATCH = 17, 32, 4, 8, 30, 96


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, HEADS * SIZE, bias=False) for _ in range(3))
        self.q_norm, self.k_norm = nn.RMSNorm(SIZE), nn.RMSNorm(SIZE)
        self.o = nn.Linear(HEADS * SIZE, WIDTH, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (layer(x).view(b, t, -1, SIZE).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.o(y.transpose(1, 2).reshape(b, t, -1))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2, self.attention = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH), Attention()
        self.gate, self.up = nn.Linear(WIDTH, 64, bias=False), nn.Linear(WIDTH, 64, bias=False)
        self.down = nn.Linear(64, WIDTH, bias=False)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Arithmetic(nn.Module):
    def __init__(self):
        super().__init__()
        self.numbers, self.signs = nn.Embedding(MOD, WIDTH), nn.Embedding(2, WIDTH)
        self.places = nn.Parameter(torch.randn(3, WIDTH) * 0.5)
        self.blocks = nn.ModuleList([Block()])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, MOD)

    def forward(self, a, sign, b):
        x = torch.stack([self.numbers(a), self.signs(sign), self.numbers(b)], 1) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 1]))


PLAN = {"attention.q": ColwiseParallel(), "attention.k": ColwiseParallel(), "attention.v": ColwiseParallel(),
        "attention.o": RowwiseParallel(), "gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}


def clip(split, plain, limit):
    squares = sum(p.grad.to_local().square().sum() for p in split)
    dist.all_reduce(squares)                    # shards add up; the plain ones are the same everywhere
    squares += sum(p.grad.square().sum() for p in plain)
    norm = squares.sqrt().item()
    for p in [*split, *plain]:
        p.grad.mul_(min(1.0, limit / (norm + 1e-6)))
    return norm


def main():
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", 29627)):
        os.environ.setdefault(name, str(value))
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(3)
    net = Arithmetic()
    for block in net.blocks:
        parallelize_module(block, mesh, PLAN)
    split = [p for p in net.parameters() if isinstance(p, DTensor)]
    plain = [p for p in net.parameters() if not isinstance(p, DTensor)]
    by_heads = [p for name, p in net.named_parameters() if "q_norm" in name or "k_norm" in name]
    optimizer = torch.optim.AdamW([{"params": split, "weight_decay": 0.02}, {"params": plain, "weight_decay": 0.0}],
                                  lr=2e-2, betas=(0.9, 0.98))

    table = torch.cartesian_prod(torch.arange(MOD), torch.arange(2), torch.arange(MOD))
    answers = torch.where(table[:, 1] == 0, table[:, 0] + table[:, 2], table[:, 0] * table[:, 2]) % MOD
    order = torch.randperm(len(table), generator=torch.Generator().manual_seed(1))
    train, test = order[:480], order[480:]
    draw = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        rows = train[torch.randint(0, len(train), (BATCH,), generator=draw)]       # the same on all
        loss = F.cross_entropy(net(*table[rows].T), answers[rows])
        optimizer.zero_grad()
        loss.backward()
        for p in by_heads:
            dist.all_reduce(p.grad, group=mesh.get_group("tp"))
        norm = clip(split, plain, 1.0)
        optimizer.step()
        if dist.get_rank() == 0 and step % 10 == 9:
            print(f"step {step + 1}: loss {loss.item():.4f}, norm {norm:.4f}")
    with torch.no_grad():
        for name, rows in (("train", train), ("test", test)):
            right = (net(*table[rows].T).argmax(1) == answers[rows]).sum().item()
            if dist.get_rank() == 0:
                print(f"{name}: {right} of {len(rows)} right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
