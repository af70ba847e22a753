"""Character-level GRU on short generated verses."""
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

CHARS = " abcdefghijklmnopqrstuvwxyz."
PAD = -100
LINES = 192
BATCH = 32
EPOCHS = 3

NOUNS = "moon river stone bird winter lamp harbour cloud ember garden".split()
VERBS = "sings waits falls drifts sleeps burns turns".split()
PLACES = ["by the sea", "in the long night", "under old trees", "far", "above the silent town"]


def make_lines(n):
    rng = random.Random(7)
    lines = []
    for _ in range(n):
        words = ["the", rng.choice(NOUNS), rng.choice(VERBS)]
        if rng.random() < 0.6:
            words.append(rng.choice(PLACES))
        if rng.random() < 0.3:
            words += ["and", "the", rng.choice(NOUNS), rng.choice(VERBS)]
        lines.append(" ".join(words) + ".")
    return lines


def encode(lines):
    ids = [torch.tensor([CHARS.index(c) for c in line]) for line in lines]
    x = nn.utils.rnn.pad_sequence([i[:-1] for i in ids], batch_first=True)
    y = nn.utils.rnn.pad_sequence([i[1:] for i in ids], batch_first=True, padding_value=PAD)
    return x, y


class VerseModel(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.embed = nn.Embedding(len(CHARS), 24)
        self.rnn = nn.GRU(24, width, batch_first=True)
        self.head = nn.Linear(width, len(CHARS))

    def forward(self, x):
        h, _ = self.rnn(self.embed(x))
        return self.head(h)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    lines = make_lines(LINES)
    model = DDP(VerseModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)

    for epoch in range(EPOCHS):
        order = torch.randperm(LINES, generator=torch.Generator().manual_seed(epoch)).tolist()
        epoch_nll = torch.zeros(2)
        for start in range(0, LINES, BATCH):
            batch = order[start:start + BATCH][rank::world]
            x, y = encode([lines[i] for i in batch])
            tokens = (y != PAD).sum()
            dist.all_reduce(tokens)

            logits = model(x)
            nll = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=PAD, reduction="sum")
            loss = nll * world / tokens
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()

            epoch_nll[0] += nll.detach()
            epoch_nll[1] += (y != PAD).sum()
        dist.all_reduce(epoch_nll)
        if rank == 0:
            print(f"epoch {epoch} nll/char {epoch_nll[0] / epoch_nll[1]:.5f}")

    if rank == 0:
        prompt = "the "
        ids = torch.tensor([[CHARS.index(c) for c in prompt]])
        with torch.no_grad():
            for _ in range(20):
                nxt = model.module(ids)[:, -1].argmax(-1, keepdim=True)
                ids = torch.cat([ids, nxt], dim=1)
        print("sample:", "".join(CHARS[i] for i in ids[0].tolist()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
