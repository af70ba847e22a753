"""Small causal LM on synthetic, variable-length arithmetic strings; gradient accumulation; one loss per valid token."""
import argparse
import contextlib
import math
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CHARS = "0123456789+=$"
PAD = -100


class Sums(Dataset):
    def __init__(self, n, seed):
        r = random.Random(seed)
        self.rows = []
        for _ in range(n):
            digits = r.choice([1, 2, 4, 6])
            a, b = r.randrange(10 ** digits), r.randrange(10 ** digits)
            self.rows.append(torch.tensor([CHARS.index(c) for c in f"{a}+{b}={a + b}$"]))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def collate(rows):
    n = max(len(r) for r in rows)
    x = torch.zeros(len(rows), n - 1, dtype=torch.long)
    y = torch.full((len(rows), n - 1), PAD)
    for i, r in enumerate(rows):
        x[i, :len(r) - 1] = r[:-1]
        y[i, :len(r) - 1] = r[1:]
    return x, y


class GPT(nn.Module):
    def __init__(self, d=48, heads=4, layers=2, ctx=32):
        super().__init__()
        self.tok = nn.Embedding(len(CHARS), d)
        self.pos = nn.Embedding(ctx, d)
        layer = lambda: nn.TransformerEncoderLayer(d, heads, 4 * d, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList(layer() for _ in range(layers))
        self.ln = nn.LayerNorm(d)
        self.head = nn.Linear(d, len(CHARS), bias=False)
        nn.init.normal_(self.tok.weight, std=0.02)
        self.head.weight = self.tok.weight

    def forward(self, x):
        n = x.shape[1]
        mask = torch.triu(torch.full((n, n), float("-inf")), 1)
        h = self.tok(x) + self.pos(torch.arange(n))
        for b in self.blocks:
            h = b(h, src_mask=mask, is_causal=True)
        return self.head(self.ln(h))


def windows(it, k):
    buf = []
    for item in it:
        buf.append(item)
        if len(buf) == k:
            yield buf
            buf = []
    if buf:
        yield buf


def main(a):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(a.seed)
    data = Sums(288, seed=1)
    sampler = DistributedSampler(data, seed=a.seed)
    loader = DataLoader(data, a.batch_size, sampler=sampler, collate_fn=collate)
    model = DDP(GPT())
    opt = torch.optim.AdamW(model.parameters(), lr=a.lr, betas=(0.9, 0.95))
    per_epoch = math.ceil(len(loader) / a.accum)
    total = per_epoch * a.epochs
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: min(1.0, (s + 1) / 4) * 0.5 * (1 + math.cos(math.pi * s / total)))

    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for window in windows(loader, a.accum):
            tokens = torch.tensor(float(sum((y != PAD).sum() for _, y in window)))
            dist.all_reduce(tokens)
            running = torch.zeros(())
            for j, (x, y) in enumerate(window):
                last = j == len(window) - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    nll = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")
                    (nll * world / tokens).backward()
                running += nll.detach()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.35)
            opt.step()
            opt.zero_grad()
            sched.step()
        dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch} loss/token {(running / tokens).item():.4f} grad norm {norm:.3f} "
                  f"lr {sched.get_last_lr()[0]:.2e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=8)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=42)
    main(ap.parse_args())
