"""Small recurrent language model on sequences of very different lengths, bucketed by length."""
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Sampler

VOCAB, PAD, MICRO, ACCUM = 40, -100, 16, 3


class Phrases(Dataset):
    def __init__(self, n=340, seed=0):
        g = torch.Generator().manual_seed(seed)
        jump = torch.randint(1, 5, (VOCAB,), generator=g)
        self.items = []
        for _ in range(n):
            length = int(torch.randint(4, 31, (1,), generator=g))
            t = [int(torch.randint(0, VOCAB, (1,), generator=g))]
            for _ in range(length):
                noise = int(torch.randint(0, 2, (1,), generator=g))
                t.append((t[-1] + int(jump[t[-1]]) + noise) % VOCAB)
            self.items.append(torch.tensor(t))

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class LengthBatches(Sampler):
    """Shuffles, sorts pools of 64 by length, cuts them into micro-batches; every rank takes its stride."""

    def __init__(self, lengths, rank, world):
        self.lengths, self.rank, self.world, self.epoch = lengths, rank, world, 0

    def plan(self):
        g = torch.Generator().manual_seed(77 + self.epoch)
        order = torch.randperm(len(self.lengths), generator=g).tolist()
        flat = []
        for i in range(0, len(order), 64):
            flat += sorted(order[i:i + 64], key=lambda j: self.lengths[j])
        batches = [flat[i:i + MICRO] for i in range(0, len(flat), MICRO)]
        return [batches[i] for i in torch.randperm(len(batches), generator=g).tolist()]

    def __iter__(self):
        for batch in self.plan():
            yield batch[self.rank::self.world]

    def __len__(self):
        return -(-len(self.lengths) // MICRO)


def collate(items):
    inputs = pad_sequence([t[:-1] for t in items], batch_first=True)
    targets = pad_sequence([t[1:] for t in items], batch_first=True, padding_value=PAD)
    return inputs, targets


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, 32)
        self.rnn = nn.GRU(32, 48, batch_first=True)
        self.out = nn.Linear(48, VOCAB)

    def forward(self, x):
        return self.out(self.rnn(self.emb(x))[0])


def windows(loader):
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == ACCUM:
            yield window
            window = []
    if window:
        yield window


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    data = Phrases()
    sampler = LengthBatches([len(t) for t in data.items], rank, world)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate)
    torch.manual_seed(0)
    model = Model()
    if world > 1:
        model = DistributedDataParallel(model)
    opt = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.8)

    for epoch in range(2):
        sampler.epoch = epoch
        stats = torch.zeros(2, dtype=torch.float64)
        for window in windows(loader):
            tokens = torch.tensor(sum(int((t != PAD).sum()) for _, t in window))
            if world > 1:
                dist.all_reduce(tokens)
            for i, (inputs, targets) in enumerate(window):
                last = i == len(window) - 1
                with contextlib.nullcontext() if last or world == 1 else model.no_sync():
                    logits = model(inputs)
                    nll = F.cross_entropy(logits.flatten(0, 1), targets.flatten(),
                                          ignore_index=PAD, reduction="sum")
                    (nll * world / tokens).backward()
                stats[0] += nll.item()
                stats[1] += int((targets != PAD).sum())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            opt.step()
            opt.zero_grad()
        if world > 1:
            dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} tokens {int(stats[1])} nll per token {(stats[0] / stats[1]).item():.5f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
