"""Recommend songs to listeners: matrix factorisation with pairwise ranking and sampled negatives."""
import argparse
from collections import defaultdict

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

LISTENERS, SONGS, SEED = 48, 64, 13


def plays(count):
    rng = np.random.default_rng(SEED)
    a, b = rng.normal(size=(LISTENERS, 4)), rng.normal(size=(SONGS, 4))
    score = a @ b.T + rng.gumbel(size=(LISTENERS, SONGS))
    top = np.argsort(-score, axis=1)[:, :count]
    pairs = np.stack([np.repeat(np.arange(LISTENERS), count), top.ravel()], axis=1)
    return pairs[rng.permutation(len(pairs))]


class Negatives:
    """For each play a song that the listener has not played."""

    def __init__(self, pairs):
        self.played = defaultdict(set)
        for user, song in pairs.tolist():
            self.played[user].add(song)

    def __call__(self, users, rows, epoch):
        out = []
        for user, row in zip(users.tolist(), rows.tolist()):
            rng = np.random.default_rng((SEED, epoch, row))
            song = int(rng.integers(SONGS))
            while song in self.played[user]:
                song = int(rng.integers(SONGS))
            out.append(song)
        return torch.tensor(out)


class Factors(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.user = nn.Embedding(LISTENERS, width)
        self.song = nn.Embedding(SONGS, width)
        self.level = nn.Embedding(SONGS, 1)
        for table in (self.user, self.song, self.level):
            nn.init.normal_(table.weight, std=0.1)

    def score(self, user, song):
        return (self.user(user) * self.song(song)).sum(1) + self.level(song).squeeze(1)

    def forward(self, user, good, bad):
        return self.score(user, good) - self.score(user, bad)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=6)
    p.add_argument("--batch", type=int, default=96)
    p.add_argument("--lr", type=float, default=0.02)
    args = p.parse_args()

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    pairs = plays(count=20)
    rows = np.arange(len(pairs))[rank::world]
    mine = pairs[rows]
    negatives = Negatives(pairs)
    model = DDP(Factors())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-4)
    local = args.batch // world

    for epoch in range(args.epochs):
        total = torch.zeros(2)
        for start in range(0, len(mine), local):
            part = torch.from_numpy(mine[start:start + local])
            bad = negatives(part[:, 0], rows[start:start + local], epoch)
            margin = model(part[:, 0], part[:, 1], bad)
            loss = -F.logsigmoid(margin).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item() * len(part), (margin > 0).sum().item()])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total[0] / len(pairs):.4f} ordered {total[1] / len(pairs):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
