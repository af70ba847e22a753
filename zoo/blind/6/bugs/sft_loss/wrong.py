"""Question/answer tuning of a small GRU: only answer tokens count, lengths vary, two micro-batches per step."""
import argparse
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

IGNORE = -100
DIGITS = "0123456789+=.$"
ID = {c: i for i, c in enumerate(DIGITS)}


def make_pairs(n, seed):
    g = torch.Generator().manual_seed(seed)
    pairs = []
    for _ in range(n):
        hi = 10 ** int(torch.randint(1, 5, (1,), generator=g))
        a, b = (int(v) for v in torch.randint(0, hi, (2,), generator=g))
        pairs.append((f"{a}+{b}=", f"{a + b}."))
    return pairs


def collate(pairs, width=18):
    ids = torch.full((len(pairs), width), ID["$"])
    labels = torch.full((len(pairs), width), IGNORE)
    for r, (q, a) in enumerate(pairs):
        seq = [ID[c] for c in q + a]
        ids[r, :len(seq)] = torch.tensor(seq)
        labels[r, len(q) - 1:len(seq) - 1] = torch.tensor(seq[len(q):])
    return ids, labels


class Adder(nn.Module):
    def __init__(self, dim=24, hidden=48):
        super().__init__()
        self.emb = nn.Embedding(len(DIGITS), dim)
        self.rnn = nn.GRU(dim, hidden, batch_first=True)
        self.head = nn.Linear(hidden, len(DIGITS))

    def forward(self, ids):
        return self.head(self.rnn(self.emb(ids))[0])


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    pairs = make_pairs(1500, 4)
    torch.manual_seed(0)
    model = DistributedDataParallel(Adder())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    history = []
    for step in range(args.steps):
        g = torch.Generator().manual_seed(1000 + step)
        chosen = torch.randperm(len(pairs), generator=g)[:args.batch].tolist()[rank::world]
        half = len(chosen) // args.accumulate
        micro = [collate([pairs[i] for i in chosen[k * half:(k + 1) * half]]) for k in range(args.accumulate)]
        tokens = torch.tensor(float(sum((lab != IGNORE).sum() for _, lab in micro)))
        dist.all_reduce(tokens)
        total = 0.0
        for k, (ids, labels) in enumerate(micro):
            last = k == args.accumulate - 1
            with nullcontext() if last else model.no_sync():
                logits = model(ids)
                nll = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
                (nll / tokens).backward()
            total += nll.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        opt.step()
        opt.zero_grad()
        dist.all_reduce(total)
        history.append((total / tokens).item())
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1:3d}  nll/token {history[-1]:.4f}  ({int(tokens)} tokens)")
    return model, history


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--accumulate", type=int, default=2)
    ap.add_argument("--lr", type=float, default=0.3)
    ap.add_argument("--clip", type=float, default=5.0)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model, history = train(args)
    if dist.get_rank() == 0:
        print(f"first {history[0]:.4f} last {history[-1]:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
