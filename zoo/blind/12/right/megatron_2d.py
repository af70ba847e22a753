"""Digits as eight tokens: attention and MLP split over pairs of processes (Megatron style), the pairs share the data."""
import os
import time

import torch
from torch import distributed as dist, nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

WIDTH, HEADS, BATCH, EPOCHS = 32, 4, 64, 2


class Enter(torch.autograd.Function):
    """Copies into the parallel region."""
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)
    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    """Adds up the parts of the parallel region."""
    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x
    @staticmethod
    def backward(ctx, grad):
        return grad, None


class SplitLinear(nn.Module):
    """Linear layer of which this process holds some rows (dim 0) or columns (dim 1)."""

    def __init__(self, n_in, n_out, dim, tp):
        super().__init__()
        full = nn.Linear(n_in, n_out)
        self.dim, self.group = dim, tp["group"]
        self.weight = nn.Parameter(full.weight.data.chunk(tp["size"], dim)[tp["rank"]].clone())
        self.bias = nn.Parameter(full.bias.data.chunk(tp["size"])[tp["rank"]].clone() if dim == 0 else full.bias.data.clone())
        self.weight.is_split, self.bias.is_split = True, dim == 0

    def forward(self, x):
        if self.dim == 0:
            return F.linear(x, self.weight, self.bias)
        return Leave.apply(F.linear(x, self.weight), self.group) + self.bias


class Block(nn.Module):
    def __init__(self, tp):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (SplitLinear(WIDTH, WIDTH, 0, tp) for _ in range(3))
        self.o = SplitLinear(WIDTH, WIDTH, 1, tp)
        self.up, self.down = SplitLinear(WIDTH, 4 * WIDTH, 0, tp), SplitLinear(4 * WIDTH, WIDTH, 1, tp)
        self.heads, self.group = HEADS // tp["size"], tp["group"]

    def forward(self, x):
        b, t, _ = x.shape
        h = Enter.apply(self.ln1(x), self.group)
        q, k, v = (f(h).view(b, t, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1))
        return x + self.down(F.gelu(self.up(Enter.apply(self.ln2(x), self.group))))


class Reader(nn.Module):
    def __init__(self, tp):
        super().__init__()
        self.embed, self.place = nn.Linear(8, WIDTH), nn.Parameter(torch.randn(8, WIDTH) * 0.1)
        self.blocks = nn.Sequential(Block(tp), Block(tp))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        x = self.embed(x.view(-1, 8, 8)) + self.place
        return self.head(self.blocks(x).mean(1))


def clip(params, tp, limit):
    split = sum(p.grad.square().sum() for p in params if getattr(p, "is_split", False))
    dist.all_reduce(split, group=tp["group"])
    norm = (split + sum(p.grad.square().sum() for p in params if not getattr(p, "is_split", False))).sqrt()
    for p in params:
        p.grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def main():
    alone = {} if "RANK" in os.environ else dict(store=dist.HashStore(), rank=0, world_size=1)
    dist.init_process_group("gloo", **alone)
    rank, world = dist.get_rank(), dist.get_world_size()
    size = 2 if world % 2 == 0 else 1
    tp_groups = [dist.new_group(list(range(i, i + size))) for i in range(0, world, size)]
    dp_groups = [dist.new_group(list(range(i, world, size))) for i in range(size)]
    tp = {"group": tp_groups[rank // size], "rank": rank % size, "size": size}
    dp_group, dp_rank, dp = dp_groups[rank % size], rank // size, world // size
    torch.manual_seed(77)
    net = Reader(tp)
    params = list(net.parameters())
    optimizer = torch.optim.AdamW(params, lr=3e-3, weight_decay=0.02, eps=1e-6)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 8 - 1, torch.tensor(y)
    for epoch in range(EPOCHS):
        order = torch.randperm(1280, generator=torch.Generator().manual_seed(epoch))
        for i in range(0, 1280, BATCH):
            mine = order[i: i + BATCH].chunk(dp)[dp_rank]
            loss = F.cross_entropy(net(x[mine]), y[mine])
            optimizer.zero_grad()
            loss.backward()
            for p in params:
                dist.all_reduce(p.grad.div_(dp), group=dp_group)
            norm = clip(params, tp, 0.8)
            optimizer.step()
            if i % 320 == 0 and rank == 0:
                print(f"epoch {epoch} row {i} norm {norm.item():.4f}", flush=True)
        with torch.no_grad():
            hits = (net(x[1280:]).argmax(1) == y[1280:]).sum().item()
        if rank == 0:
            print(f"epoch {epoch} held-out {hits}/{len(x) - 1280}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
