"""Which standard module does this line come from?  GRU classifier with length buckets."""
import argparse
import importlib
import inspect
import random
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

SOURCES = ["argparse", "ast", "textwrap", "fractions"]


class Lines(Dataset):
    def __init__(self, per_source=110, max_len=60):
        self.items = []
        for label, name in enumerate(SOURCES):
            text = inspect.getsource(importlib.import_module(name))
            lines = [l.strip() for l in text.splitlines() if len(l.strip()) > 5]
            stride = max(1, len(lines) // per_source)
            for line in lines[::stride][:per_source]:
                codes = [min(ord(c), 127) for c in line[:max_len]]
                self.items.append((torch.tensor(codes), label))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]

    def lengths(self):
        return [len(codes) for codes, _ in self.items]


class BucketBatches(Sampler):
    """Batches of lines of similar length; every process reads its share of each batch."""

    def __init__(self, lengths, batch_size, rank, world, seed, pool=4):
        self.lengths, self.batch_size = lengths, batch_size
        self.rank, self.world, self.pool = rank, world, pool
        self.rng = random.Random(seed)

    def plan(self):
        order = list(range(len(self.lengths)))
        self.rng.shuffle(order)
        span, batches = self.pool * self.batch_size, []
        for at in range(0, len(order), span):
            near = sorted(order[at:at + span], key=lambda i: self.lengths[i])
            for k in range(0, len(near) - self.batch_size + 1, self.batch_size):
                batches.append(near[k:k + self.batch_size])
        self.rng.shuffle(batches)
        return batches

    def __iter__(self):
        for batch in self.plan():
            yield batch[self.rank::self.world]

    def __len__(self):
        return len(self.lengths) // self.batch_size


def collate(items):
    codes = [c for c, _ in items]
    return (pad_sequence(codes, batch_first=True), torch.tensor([len(c) for c in codes]),
            torch.tensor([label for _, label in items]))


class LineModel(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(128, 24)
        self.gru = nn.GRU(24, width, batch_first=True)
        self.head = nn.Linear(width, len(SOURCES))

    def forward(self, codes, lengths):
        packed = pack_padded_sequence(self.embed(codes), lengths, batch_first=True, enforce_sorted=False)
        _, last = self.gru(packed)
        return self.head(last[0])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="over all processes")
    parser.add_argument("--lr", type=float, default=0.2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)

    data = Lines()
    sampler = BucketBatches(data.lengths(), args.batch_size, rank, world, seed=7)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    model = DDP(LineModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        total = torch.zeros(2)
        for codes, lengths, labels in loader:
            loss = F.cross_entropy(model(codes, lengths), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            total += torch.tensor([loss.item() * len(labels), len(labels)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: {len(loader)} steps, loss {total[0] / total[1]:.4f}", flush=True)

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
