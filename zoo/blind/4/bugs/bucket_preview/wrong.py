"""Which standard-library module does a line come from?  Character GRU, length-bucketed batches."""
import argparse
import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

MODULES = ["argparse", "ast", "calendar", "csv", "difflib", "fractions", "heapq", "textwrap"]


def read_lines(per_module):
    root = Path(os.__file__).parent
    samples = []
    for label, name in enumerate(MODULES):
        kept = []
        for line in (root / f"{name}.py").read_text(encoding="utf-8").splitlines():
            line = line.strip()
            if 12 <= len(line) <= 72 and line.isascii():
                kept.append((line, label))
        samples.extend(kept[:per_module])
    return samples


class BucketedBatches:
    """Shuffles all samples, sorts windows of them by length, cuts global batches, and hands out
    this process's part of each."""

    def __init__(self, samples, global_batch, rank, world):
        self.samples, self.batch = samples, global_batch
        self.rank, self.world = rank, world

    def epoch(self):
        order = list(range(len(self.samples)))
        random.shuffle(order)
        window = 8 * self.batch
        batches = []
        for start in range(0, len(order), window):
            part = sorted(order[start:start + window], key=lambda i: len(self.samples[i][0]))
            for b in range(0, len(part) - self.batch + 1, self.batch):
                batches.append(part[b:b + self.batch])
        random.shuffle(batches)
        for batch in batches:
            yield [self.samples[i] for i in batch[self.rank::self.world]]


def collate(items):
    longest = max(len(text) for text, _ in items)
    ids = torch.zeros(len(items), longest, dtype=torch.long)
    for row, (text, _) in enumerate(items):
        ids[row, :len(text)] = torch.tensor(list(text.encode("ascii")))
    lengths = torch.tensor([len(text) for text, _ in items])
    return ids, lengths, torch.tensor([label for _, label in items])


class LineClassifier(nn.Module):
    def __init__(self, width=24, classes=len(MODULES)):
        super().__init__()
        self.embed = nn.Embedding(128, width, padding_idx=0)
        self.gru = nn.GRU(width, 32, batch_first=True)
        self.out = nn.Linear(32, classes)

    def forward(self, ids, lengths):
        states, _ = self.gru(self.embed(ids))
        mask = (torch.arange(ids.size(1))[None] < lengths[:, None]).unsqueeze(-1)
        return self.out((states * mask).sum(1) / lengths[:, None])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--global-batch", type=int, default=32)
    ap.add_argument("--per-module", type=int, default=60)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--seed", type=int, default=11)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    random.seed(args.seed)
    torch.manual_seed(args.seed)

    samples = read_lines(args.per_module)
    loader = BucketedBatches(samples, args.global_batch, rank, world)
    model = DistributedDataParallel(LineClassifier())
    optim = torch.optim.Adam(model.parameters(), lr=args.lr)
    for epoch in range(args.epochs):
        if rank == 0:
            text, label = random.choice(samples)
            print(f"epoch {epoch}, for example {MODULES[label]}: {text!r}")
        total = torch.zeros(2, dtype=torch.float64)
        for items in loader.epoch():
            ids, lengths, labels = collate(items)
            loss = F.cross_entropy(model(ids, lengths), labels)
            optim.zero_grad()
            loss.backward()
            optim.step()
            total += torch.tensor([loss.item() * len(items), len(items)], dtype=torch.float64)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total[0] / total[1]:.6f} over {int(total[1])} lines")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
