"""Byte-level language model on lines of source text.  The learning rate is a function of the tokens seen."""
import argparse
import inspect
import json
import math
import textwrap
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

PAD = 0


def corpus():
    text = inspect.getsource(json.decoder) + inspect.getsource(textwrap)
    lines = [line.rstrip() for line in text.splitlines() if len(line.strip()) > 3]
    return [torch.tensor(list(line.encode("utf-8"))[:80]) for line in lines]


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.heads = heads

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class ByteLM(nn.Module):
    def __init__(self, dim=32, heads=4, depth=2, length=80):
        super().__init__()
        self.tok, self.pos = nn.Embedding(256, dim), nn.Embedding(length, dim)
        self.blocks = nn.Sequential(*[Block(dim, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256)

    def forward(self, ids):
        h = self.tok(ids) + self.pos(torch.arange(ids.size(1)))
        return self.head(self.norm(self.blocks(h)))


class TokenSchedule:
    def __init__(self, optim, peak, warmup, budget):
        self.optim, self.peak, self.warmup, self.budget = optim, peak, warmup, budget
        self.seen = 0
        self.apply()

    def rate(self):
        if self.seen < self.warmup:
            return self.peak * (0.1 + 0.9 * self.seen / self.warmup)
        part = min(1.0, (self.seen - self.warmup) / (self.budget - self.warmup))
        return self.peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * part)))

    def apply(self):
        for group in self.optim.param_groups:
            group["lr"] = self.rate()

    def advance(self, tokens):
        self.seen += tokens
        self.apply()


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    lines = corpus()
    model = ByteLM()
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98))
    schedule = TokenSchedule(optim, args.lr, args.warmup_tokens, args.token_budget)
    draw = torch.Generator().manual_seed(args.seed)

    for step in range(args.steps):
        picked = torch.randperm(len(lines), generator=draw)[:args.lines].tolist()
        batch = nn.utils.rnn.pad_sequence([lines[i] for i in picked[rank::world]], batch_first=True, padding_value=PAD)
        inputs, targets = batch[:, :-1], batch[:, 1:]
        local = (targets != PAD).sum()
        tokens = local.clone()
        dist.all_reduce(tokens)
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum") / tokens
        optim.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optim.step()
        schedule.advance(local.item())
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and (step + 1) % 8 == 0:
            print(f"step {step + 1:3d} loss {total.item():.5f} lr {optim.param_groups[0]['lr']:.6f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--lines", type=int, default=16)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--warmup-tokens", type=int, default=4000)
    ap.add_argument("--token-budget", type=int, default=24000)
    ap.add_argument("--seed", type=int, default=17)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train(args)
    time.sleep(0.3)
    dist.destroy_process_group()
