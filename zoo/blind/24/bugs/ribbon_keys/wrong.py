#!/usr/bin/env python
# Causal attention over a long ribbon of tokens, the sequence being cut over the processes.
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, DIM, HEADS, LENGTH, BATCH, STEPS = 12, 32, 4, 64, 8, 30


class GatherSeq(torch.autograd.Function):
    """[B, H, n, d] on every rank -> [B, H, n * world, d]"""

    @staticmethod
    def forward(ctx, t):
        ctx.n = t.shape[2]
        parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, t.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, g):
        start = dist.get_rank() * ctx.n
        return g[:, :, start:start + ctx.n]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 64), nn.GELU(), nn.Linear(64, DIM))

    def forward(self, x, first):
        b, n, _ = x.shape
        q, k, v = (t.view(b, n, HEADS, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        k, v = GatherSeq.apply(k), GatherSeq.apply(v)
        seen = torch.arange(k.shape[2]) <= torch.arange(first, first + n)[:, None]
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        x = x + self.proj(a.transpose(1, 2).reshape(b, n, DIM))
        return x + self.mlp(self.norm2(x))


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, ids, first):
        x = self.tok(ids) + self.pos(torch.arange(first, first + ids.shape[1]))
        for layer in self.layers:
            x = layer(x, first)
        return self.out(x)


def ribbons(gen):
    """Each ribbon repeats a motif of 9 tokens, with a few tokens replaced."""
    motif = torch.randint(0, VOCAB, (BATCH, 9), generator=gen)
    full = motif.repeat(1, LENGTH // 9 + 2)[:, :LENGTH + 1]
    noise = torch.rand(full.shape, generator=gen) < 0.05
    full = torch.where(noise, torch.randint(0, VOCAB, full.shape, generator=gen), full)
    return full[:, :-1], full[:, 1:]


if __name__ == "__main__":
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29544")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    n = LENGTH // world
    mine = slice(rank * n, (rank + 1) * n)

    torch.manual_seed(8)
    net = Reader()
    opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.8)
    gen = torch.Generator().manual_seed(80)
    for it in range(STEPS):
        ids, target = ribbons(gen)
        logits = net(ids[:, mine], rank * n)
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, mine].flatten(), reduction="sum") / target.numel()
        opt.zero_grad()
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and it % 6 == 5:
            print("iter", it + 1, "nll", round(shown.item(), 5), flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()
