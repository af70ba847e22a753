"""Small decoder trained with context parallelism: every process holds a slice of each sequence.

Keys and values are gathered over the processes for the attention; everything else is local to the slice.
The task: copy the first half of a sequence of symbols into its second half, shifted by one symbol class.
"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB = 16


class GatherSequence(torch.autograd.Function):
    """Concatenate the slices of all processes along the sequence; gradients are summed and cut back."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        ctx.length = x.shape[1]
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.narrow(1, dist.get_rank() * ctx.length, ctx.length)


class ContextAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, positions, total):
        b, t, d = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        k, v = GatherSequence.apply(k), GatherSequence.apply(v)
        q, k, v = (z.view(b, -1, self.heads, d // self.heads).transpose(1, 2) for z in (q, k, v))
        visible = positions[:, None] >= torch.arange(total)[None, :]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Decoder(nn.Module):
    def __init__(self, length, dim=32, heads=4, layers=2):
        super().__init__()
        self.length = length
        self.tok = nn.Embedding(VOCAB, dim)
        self.pos = nn.Embedding(length, dim)
        self.attn = nn.ModuleList(ContextAttention(dim, heads) for _ in range(layers))
        self.mlp = nn.ModuleList(nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim)) for _ in range(layers))
        self.norm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(2 * layers + 1))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, tokens):
        t = tokens.shape[1]
        positions = torch.arange(t) + dist.get_rank() * t
        x = self.tok(tokens) + self.pos(positions)
        for i, (attn, mlp) in enumerate(zip(self.attn, self.mlp)):
            x = x + attn(self.norm[2 * i](x), positions, self.length)
            x = x + mlp(self.norm[2 * i + 1](x))
        return self.head(self.norm[-1](x))


def sequences(n, length, gen):
    first = torch.randint(VOCAB, (n, length // 2), generator=gen)
    whole = torch.cat([first, (first + 1) % VOCAB], dim=1)
    return whole, torch.roll(whole, -1, dims=1)


def sum_gradients(params):
    grads = [p.grad for p in params]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat)
    for g, part in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(part.view_as(g))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--length", type=int, default=16)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--steps", type=int, default=50)
    ap.add_argument("--lr", type=float, default=4e-3)
    args = ap.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(500)
    model = Decoder(args.length)
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    gen = torch.Generator().manual_seed(501)

    for step in range(1, args.steps + 1):
        tokens, targets = sequences(args.batch, args.length, gen)
        mine, wanted = tokens.chunk(world, dim=1)[rank], targets.chunk(world, dim=1)[rank]
        logits = model(mine)
        loss = F.cross_entropy(logits.reshape(-1, VOCAB), wanted.reshape(-1), reduction="sum") / tokens.numel()
        opt.zero_grad()
        loss.backward()
        sum_gradients(model.parameters())
        opt.step()
        if step % 10 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} nll {shown.item():.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
