"""Context parallelism by hand: the sequence is cut in 2W pieces, rank r holds pieces r and 2W-1-r.

Keys and values are gathered, queries stay local; parameters are replicated and their gradients summed.
"""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


@dataclass
class Config:
    vocab: int = 20
    dim: int = 32
    heads: int = 4
    layers: int = 2
    length: int = 32
    batch: int = 8
    steps: int = 30
    lr: float = 3e-3


class GatherSequence(torch.autograd.Function):
    """All ranks' pieces in the order of the sequence; backward sums the ranks' gradients of the own pieces."""
    @staticmethod
    def forward(ctx, x, places):
        ctx.places = places
        parts = [torch.empty_like(x) for _ in places]
        dist.all_gather(parts, x.contiguous())
        full = x.new_empty(*x.shape[:2], sum(len(p) for p in places), x.shape[3])
        for p, part in zip(places, parts):
            full[:, :, p] = part
        return full

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad[:, :, ctx.places[dist.get_rank()]], None


def rotary(x, pos):
    half = x.size(-1) // 2
    freq = 100.0 ** (-torch.arange(half) / half)
    ang = pos[:, None] * freq
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * ang.cos() - b * ang.sin(), a * ang.sin() + b * ang.cos()], -1)


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.heads
        self.n1, self.n2 = nn.LayerNorm(c.dim), nn.LayerNorm(c.dim)
        self.qkv, self.proj = nn.Linear(c.dim, 3 * c.dim), nn.Linear(c.dim, c.dim)
        self.mlp = nn.Sequential(nn.Linear(c.dim, 4 * c.dim), nn.GELU(), nn.Linear(4 * c.dim, c.dim))

    def forward(self, x, cp):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = rotary(q, cp.mine), rotary(k, cp.mine)
        k, v = cp.gather(k), cp.gather(v)
        mask = cp.mine[:, None] >= torch.arange(k.size(2))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm, self.head = nn.LayerNorm(c.dim), nn.Linear(c.dim, c.vocab)

    def forward(self, ids, cp):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, cp)
        return self.head(self.norm(x))


class Context:
    def __init__(self, length):
        self.on = "RANK" in os.environ
        if self.on:
            dist.init_process_group("gloo")
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if self.on else (0, 1)
        pieces = torch.arange(length).chunk(2 * self.world)
        self.places = [torch.cat([pieces[r], pieces[2 * self.world - 1 - r]]) for r in range(self.world)]
        self.mine = self.places[self.rank]

    def gather(self, x):
        return GatherSequence.apply(x, self.places) if self.on else x

    def sum(self, t):
        if self.on:
            dist.all_reduce(t)
        return t


def documents(c, n, g):
    """Periodic token strings; the loss starts after a prefix of random length."""
    ids = torch.randint(0, c.vocab, (n, c.length + 1), generator=g)
    first = torch.randint(10, 22, (n, 1), generator=g)
    where = torch.arange(c.length + 1)
    period = torch.randint(3, 9, (n, 1), generator=g)
    ids = ids.gather(1, where % period)
    return ids[:, :-1], ids[:, 1:], (where[1:] >= first).double()


def token_sums(model, cp, data):
    ids, target, weight = (t[:, cp.mine] for t in data)
    logits = model(ids, cp)
    nll = F.cross_entropy(logits.transpose(1, 2), target, reduction="none")
    return (nll * weight).sum(), ((logits.argmax(-1) == target) * weight).sum()


def main(c=Config()):
    torch.set_default_dtype(torch.float64)
    cp = Context(c.length)
    torch.manual_seed(31)
    model = Model(c)
    optim = torch.optim.AdamW(model.parameters(), lr=c.lr)
    g = torch.Generator().manual_seed(1)
    held = documents(c, 24, torch.Generator().manual_seed(2))
    for step in range(c.steps):
        data = documents(c, c.batch, g)
        loss = token_sums(model, cp, data)[0] / data[2].sum()  # weights of the whole sequence
        optim.zero_grad()
        loss.backward()
        for p in model.parameters():
            cp.sum(p.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        if (step + 1) % 10 == 0:
            with torch.no_grad():
                nll, hit = cp.sum(torch.stack(token_sums(model, cp, held))) / held[2].sum()
            if cp.rank == 0:
                print(f"step {step + 1} held-out nll {nll:.10f} accuracy {hit:.6f}")
    if cp.on:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
