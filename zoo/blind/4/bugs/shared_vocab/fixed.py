"""Predict a word from its neighbours.  The vocabulary is counted by all processes together, each reading
some of the files."""
import argparse
import os
import re
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

FILES = ["abc.py", "bisect.py", "cmd.py", "contextlib.py", "copy.py", "dis.py", "filecmp.py", "fnmatch.py",
         "glob.py", "keyword.py", "linecache.py", "operator.py", "queue.py", "sched.py", "shlex.py", "stat.py"]
WORD = re.compile(r"[A-Za-z_]{2,}")
UNK = 0


def words_of(name):
    text = (Path(os.__file__).parent / name).read_text(encoding="utf-8")
    return WORD.findall(text.lower())


def build_vocab(size, rank, world):
    mine = Counter()
    for name in FILES[rank::world]:
        mine.update(words_of(name))
    counts = [None] * world
    dist.all_gather_object(counts, mine)
    for other in range(world):
        if other != rank:
            mine.update(counts[other])
    ranked = sorted(mine.items(), key=lambda item: (-item[1], item[0]))[:size - 1]
    return {word: i for i, (word, _) in enumerate(ranked, start=1)}


def windows(vocab, reach):
    context, center = [], []
    for name in FILES:
        ids = [vocab.get(w, UNK) for w in words_of(name)]
        for i in range(reach, len(ids) - reach):
            if ids[i] != UNK:
                context.append(ids[i - reach:i] + ids[i + 1:i + 1 + reach])
                center.append(ids[i])
    return torch.tensor(context), torch.tensor(center)


class ContextModel(nn.Module):
    def __init__(self, vocab, reach, dim):
        super().__init__()
        self.table = nn.Embedding(vocab, dim)
        self.weight = nn.Parameter(torch.full((2 * reach, dim), 1 / (2 * reach)))
        self.mix = nn.Linear(dim, dim)
        self.out = nn.Linear(dim, vocab)

    def forward(self, context):
        h = (self.table(context) * self.weight).sum(1)
        return self.out(torch.tanh(self.mix(h)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--vocab", type=int, default=600)
    ap.add_argument("--reach", type=int, default=3)
    ap.add_argument("--dim", type=int, default=24)
    ap.add_argument("--steps", type=int, default=45)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--seed", type=int, default=13)
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    vocab = build_vocab(args.vocab, rank, world)
    context, center = windows(vocab, args.reach)
    net = DDP(ContextModel(args.vocab, args.reach, args.dim))
    optim = torch.optim.Adam(net.parameters(), lr=args.lr)
    loss_fn = nn.CrossEntropyLoss()
    g = torch.Generator().manual_seed(args.seed)
    total = torch.zeros(())
    for step in range(1, args.steps + 1):
        rows = torch.randperm(len(context), generator=g)[:args.batch]
        rows = rows.chunk(world)[rank]
        loss = loss_fn(net(context[rows]), center[rows])
        optim.zero_grad()
        loss.backward()
        optim.step()
        total += loss.detach()
        if step % 9 == 0:
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step:3d} loss {total.item() / 9 / world:.6f}")
            total.zero_()
    if rank == 0:
        seen = net.module.table.weight.norm(dim=1)
        print(f"{len(vocab)} words, {len(context)} windows, mean norm {seen.mean():.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
