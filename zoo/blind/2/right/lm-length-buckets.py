"""Character LM on variable-length lines, batched by length, loss per token over all processes."""
import argparse
import math
import random
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

PAD = 0


def corpus(n, seed=17):
    rng = random.Random(seed)
    syll = ["ka", "lo", "mi", "tu", "ren", "sa", "po", "shi", "do"]
    out = []
    for _ in range(n):
        words = [rng.choice(syll) * rng.randint(1, 2) for _ in range(rng.randint(2, 9))]
        out.append(torch.tensor([27] + [ord(c) - 96 if c != " " else 28 for c in " ".join(words)] + [29]))
    return out


class LengthBatches:
    """Global batches limited by padded tokens; every process takes its share of the rows."""

    def __init__(self, lines, max_tokens, rank, world, seed=0):
        self.lines, self.max_tokens, self.rank, self.world, self.seed = lines, max_tokens, rank, world, seed

    def epoch(self, e):
        rng = random.Random(f"{self.seed}-{e}")
        order = sorted(range(len(self.lines)), key=lambda i: (len(self.lines[i]) // 8, rng.random()))
        batches, cur, width = [], [], 0
        for i in order:
            width = max(width, len(self.lines[i]))
            if cur and width * (len(cur) + 1) > self.max_tokens:
                batches.append(cur)
                cur, width = [], len(self.lines[i])
            cur.append(i)
        batches.append(cur)
        rng.shuffle(batches)
        for b in batches:
            rows = [self.lines[i] for i in b[self.rank::self.world]] or [torch.tensor([PAD, PAD])]
            yield nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PAD)


class LM(nn.Module):
    def __init__(self, vocab=30, d=48, drop=0.1, max_len=80):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        layer = nn.TransformerEncoderLayer(d, 4, 96, drop, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(d, vocab, bias=False)
        self.out.weight = self.tok.weight
        nn.init.normal_(self.tok.weight, std=0.05)

    def forward(self, t):
        n = t.shape[1]
        mask = torch.triu(torch.ones(n, n, dtype=torch.bool), 1)
        return self.out(self.body(self.tok(t) + self.pos.weight[:n], mask=mask, is_causal=True))


def nll_sum(logits, t):
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), t[:, 1:].flatten(), ignore_index=PAD, reduction="sum")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--max-tokens", type=int, default=1500, help="padded tokens in a global batch")
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--dropout", type=float, default=0.1)
    ap.add_argument("--amp", type=int, default=1)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    lines = corpus(420)
    train, val = LengthBatches(lines[:360], args.max_tokens, rank, world), lines[360 + rank::world]
    torch.manual_seed(1)
    model = DDP(LM(drop=args.dropout))
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    torch.manual_seed(1 + rank)
    step = 0
    for e in range(args.epochs):
        model.train()
        for t in train.epoch(e):
            tokens = (t[:, 1:] != PAD).sum()
            dist.all_reduce(tokens)
            with torch.autocast("cpu", torch.bfloat16, enabled=bool(args.amp)):
                logits = model(t)
            loss = nll_sum(logits, t) * world / tokens
            opt.zero_grad()
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            step += 1
        model.eval()
        acc = torch.zeros(2, dtype=torch.float64)
        with torch.no_grad():
            for line in val:
                acc += torch.tensor([nll_sum(model.module(line[None]), line[None]).item(), len(line) - 1])
        dist.all_reduce(acc)
        if rank == 0:
            print(f"epoch {e} step {step} norm {norm:.3f} val ppl {math.exp(acc[0] / acc[1]):.3f} ({int(acc[1])} tokens)")


if __name__ == "__main__":
    main()
    time.sleep(0.3)
    dist.destroy_process_group()
