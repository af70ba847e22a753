"""Recall of earlier symbols in long sequences; every process holds one stretch of the context."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)

SYMBOLS, LENGTH, LAG = 12, 64, 9
DIM, HEADS, DEPTH = 32, 4, 2
BATCH, STEPS = 12, 12


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=2)[dist.get_rank()]


def rotate(x, positions):
    half = x.size(-1) // 2
    freq = 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    angle = positions.to(x.dtype).unsqueeze(1) * freq
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)

    def forward(self, x, positions, mask):
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k = rotate(q, positions), rotate(k, positions)
        k, v = GatherSequence.apply(k), GatherSequence.apply(v)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(b, t, DIM))


class EchoModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(SYMBOLS, DIM)
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2 * DEPTH))
        self.attention = nn.ModuleList(Attention() for _ in range(DEPTH))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM)) for _ in range(DEPTH))
        self.head = nn.Linear(DIM, SYMBOLS)

    def forward(self, tokens, rank, world):
        t = tokens.size(1)
        rows = rank * t + torch.arange(t)
        mask = rows.unsqueeze(1) >= torch.arange(t * world)
        h = self.embed(tokens)
        positions = rank * t + torch.arange(t)
        for i in range(DEPTH):
            h = h + self.attention[i](self.norms[2 * i](h), positions, mask)
            h = h + self.mlp[i](self.norms[2 * i + 1](h))
        return self.head(h)


def make_batch(g):
    x = torch.randint(0, SYMBOLS, (BATCH, LENGTH), generator=g)
    y = (x + x.roll(LAG, dims=1)) % SYMBOLS
    y[:, :LAG] = -100
    return x, y


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(80)
    model = EchoModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    rng = torch.Generator().manual_seed(81)
    predicted = BATCH * (LENGTH - LAG)

    for step in range(STEPS):
        x, y = (t.chunk(world, dim=1)[rank] for t in make_batch(rng))
        logits = model(x, rank, world)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum") / predicted
        optimizer.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1:3d} loss {total.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
