"""Character language model: gradient accumulation, loss per token of the whole step, length curriculum."""
import contextlib
import math
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
BATCH, ACCUM, EPOCHS, WARMUP = 48, 3, 3, 6
ALPHABET = " abcdefghijklmnopqrstuvwxyz."
PAD = len(ALPHABET)


def corpus(n=720):
    rng = random.Random(5)
    who = ["the cat", "a small dog", "my friend", "an old sailor", "the teacher", "nobody in the town"]
    did = ["saw", "likes", "was looking for", "painted", "has forgotten", "sold"]
    what = ["the river", "a blue boat", "some bread", "the lost key", "seven green bottles", "a very long letter"]
    tail = ["", "", " today", " in the morning", " before the rain came down", " again and again"]
    lines = []
    for _ in range(n):
        s = f"{rng.choice(who)} {rng.choice(did)} {rng.choice(what)}{rng.choice(tail)}."
        if rng.random() < 0.3:
            s = s[:-1] + f" and {rng.choice(who)} {rng.choice(did)} {rng.choice(what)}."
        lines.append([ALPHABET.index(c) for c in s])
    return lines


def collate(rows):
    width = max(len(r) for r in rows)
    t = torch.full((len(rows), width), PAD)
    for i, r in enumerate(rows):
        t[i, : len(r)] = torch.tensor(r)
    return t[:, :-1], t[:, 1:]


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(3 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.n2(x))))


class CharLM(nn.Module):
    def __init__(self, d=32, heads=2, depth=2, context=160):
        super().__init__()
        self.tok = nn.Embedding(PAD + 1, d)
        self.pos = nn.Embedding(context, d)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(d)
        nn.init.normal_(self.tok.weight, std=0.1)
        nn.init.normal_(self.pos.weight, std=0.1)

    def forward(self, x):
        h = self.tok(x) + self.pos(torch.arange(x.shape[1]))
        for blk in self.blocks:
            h = blk(h)
        return self.norm(h) @ self.tok.weight[:PAD].T


def nll_sum(logits, target):
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD, reduction="sum")


def reduce_sum(t):
    if WORLD > 1:
        dist.all_reduce(t)
    return t


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    lines = corpus()
    train, held = lines[:640], lines[640:]
    net = CharLM()
    model = DDP(net) if WORLD > 1 else net
    decay = [p for p in net.parameters() if p.dim() > 1]
    plain = [p for p in net.parameters() if p.dim() <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}], lr=4e-3)
    total_steps = 30
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: min(1.0, (s + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * s / total_steps)))

    for epoch in range(EPOCHS):
        longest = [45, 70, 10_000][epoch]
        ids = [i for i in range(len(train)) if len(train[i]) <= longest]
        random.Random(100 + epoch).shuffle(ids)
        seen = torch.zeros(2)
        for start in range(0, len(ids) - BATCH + 1, BATCH):
            mine = ids[start + RANK : start + BATCH : WORLD]
            micro = [collate([train[i] for i in mine[m::ACCUM]]) for m in range(ACCUM)]
            tokens = reduce_sum(torch.tensor(sum(int((y != PAD).sum()) for _, y in micro)))
            for m, (x, y) in enumerate(micro):
                quiet = WORLD > 1 and m < ACCUM - 1
                with model.no_sync() if quiet else contextlib.nullcontext():
                    nll = nll_sum(model(x), y)
                    (nll * WORLD / tokens).backward()
                seen[0] += nll.item()
            seen[1] += tokens / WORLD
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            sched.step()
        reduce_sum(seen)
        with torch.no_grad():
            x, y = collate([held[i] for i in range(RANK, len(held), WORLD)])
            ev = reduce_sum(torch.stack([nll_sum(net(x), y), (y != PAD).sum().to(seen.dtype)]))
        if RANK == 0:
            print(f"epoch {epoch}  train nll {seen[0] / seen[1]:.5f}  held-out perplexity {(ev[0] / ev[1]).exp():.5f}")
    if WORLD > 1:
        dist.destroy_process_group()


main()
