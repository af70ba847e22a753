"""Context-parallel causal language model over synthetic wind logs.

A sequence of 64 symbols is cut into contiguous spans, one for each process.
Keys and values are gathered over the processes; everything else is local.
Gradients are summed, since the loss is already divided by the count of all
predicted positions.
"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

IGNORE = -1


class GatherSpans(torch.autograd.Function):
    """(batch, span, d) of every process -> (batch, length, d)."""

    @staticmethod
    def forward(ctx, local):
        world, ctx.rank = dist.get_world_size(), dist.get_rank()
        ctx.span = local.shape[1]
        parts = [torch.empty_like(local) for _ in range(world)]
        dist.all_gather(parts, local.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad[:, ctx.rank * ctx.span:(ctx.rank + 1) * ctx.span]


class SpanAttention(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(d, 3 * d)
        self.out = nn.Linear(d, d)

    def forward(self, x, start):
        n, t, d = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        k, v = GatherSpans.apply(k), GatherSpans.apply(v)
        q, k, v = (a.view(n, a.shape[1], self.heads, -1).transpose(1, 2) for a in (q, k, v))
        place = torch.arange(start, start + t)
        mask = place[:, None] >= torch.arange(k.shape[2])[None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(y.transpose(1, 2).reshape(n, t, d))


class WindModel(nn.Module):
    def __init__(self, vocab, length, d=32, heads=4, layers=2):
        super().__init__()
        self.token = nn.Embedding(vocab, d)
        self.place = nn.Embedding(length, d)
        self.attn = nn.ModuleList([SpanAttention(d, heads) for _ in range(layers)])
        self.mlp = nn.ModuleList([nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))
                                  for _ in range(layers)])
        self.norm = nn.ModuleList([nn.LayerNorm(d) for _ in range(layers)])
        self.head = nn.Linear(d, vocab)

    def forward(self, ids, start):
        h = self.token(ids) + self.place(torch.arange(start, start + ids.shape[1]))
        for norm, attn, mlp in zip(self.norm, self.attn, self.mlp):
            h = h + attn(norm(h), start)
            h = h + mlp(h)
        return self.head(h)


def wind_logs(n, length, vocab, g):
    """Symbols that jump by a step which itself changes every eight positions."""
    jump = torch.randint(1, 4, (n, length // 8), generator=g).repeat_interleave(8, dim=1)
    first = torch.randint(0, vocab, (n, 1), generator=g)
    return (first + jump.cumsum(1)) % vocab


def next_symbols(ids):
    return F.pad(ids[:, 1:], (0, 1), value=IGNORE)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--rows", type=int, default=12)
    ap.add_argument("--length", type=int, default=64)
    ap.add_argument("--vocab", type=int, default=12)
    ap.add_argument("--lr", type=float, default=0.25)
    args = ap.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    span = args.length // world
    start = rank * span

    torch.manual_seed(33)
    model = WindModel(args.vocab, args.length)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    g = torch.Generator().manual_seed(34)
    for step in range(args.steps):
        ids = wind_logs(args.rows, args.length, args.vocab, g)
        mine = ids[:, start:start + span]
        target = next_symbols(mine)
        count = (target != IGNORE).sum().float()
        dist.all_reduce(count)
        loss = F.cross_entropy(model(mine, start).flatten(0, 1), target.flatten(),
                               ignore_index=IGNORE, reduction="sum") / count
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        if step % 6 == 5:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1:3d} loss {shown.item():.5f}")

    with torch.no_grad():
        ids = wind_logs(64, args.length, args.vocab, torch.Generator().manual_seed(35))
        want = next_symbols(ids)[:, start:start + span]
        logits = model(ids[:, start:start + span], start)
        score = torch.stack([
            F.cross_entropy(logits.flatten(0, 1), want.flatten(), ignore_index=IGNORE, reduction="sum"),
            (logits.argmax(-1) == want).float().sum()])
        dist.all_reduce(score)
        score /= 64 * (args.length - 1)
    if rank == 0:
        print(f"held-out nll {score[0]:.5f} accuracy {score[1]:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
