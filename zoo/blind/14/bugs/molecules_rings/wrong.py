"""Graph network that tells molecules with a ring from those without one.

Molecules are trees of six to twelve atoms, half of them with one more bond. One pool of molecules is divided into a
training and a validation part; each process trains on its share of the former and scores its share of the latter.
"""
import argparse
import os
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, random_split

ATOMS, MOST = 4, 12


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def molecule(rng):
    n = int(rng.integers(6, MOST + 1))
    bonds = np.zeros((MOST, MOST), dtype=np.float32)
    parent = [int(rng.integers(max(0, i - 3), i)) for i in range(1, n)]
    for child, p in enumerate(parent, start=1):
        bonds[child, p] = bonds[p, child] = 1
    ring = int(rng.integers(2))
    while ring and bonds.sum() < 2 * n:
        a, b = rng.integers(n, size=2)
        if a != b:
            bonds[a, b] = bonds[b, a] = 1
    atoms = np.zeros((MOST, ATOMS), dtype=np.float32)
    atoms[np.arange(n), rng.integers(ATOMS, size=n)] = 1
    return torch.from_numpy(atoms), torch.from_numpy(bonds), torch.tensor(float(ring))


class RingNet(nn.Module):
    def __init__(self, width=24, rounds=3):
        super().__init__()
        self.enter = nn.Linear(ATOMS, width)
        self.own = nn.ModuleList(nn.Linear(width, width) for _ in range(rounds))
        self.near = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(rounds))
        self.leave = nn.Linear(width, 1)

    def forward(self, atoms, bonds):
        there = atoms.sum(-1, keepdim=True)
        h = self.enter(atoms) * there
        for own, near in zip(self.own, self.near):
            h = h + torch.relu(own(h) + bonds @ near(h)) * there
        return self.leave(h.sum(1) / there.sum(1)).squeeze(-1)


@torch.no_grad()
def validate(model, part, rank, world):
    own = Subset(part, range(rank, len(part), world))
    sums = torch.zeros(2)
    for atoms, bonds, ring in DataLoader(own, batch_size=20):
        logits = model(atoms, bonds)
        sums[0] += F.binary_cross_entropy_with_logits(logits, ring, reduction="sum")
        sums[1] += ((logits > 0) == ring.bool()).sum()
    dist.all_reduce(sums)
    return (sums / len(part)).tolist()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--epochs", type=int, default=5)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--seed", type=int, default=3)
    args = p.parse_args()

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29623")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)

    rng = np.random.default_rng(2024)
    pool = [molecule(rng) for _ in range(400)]
    seed_everything(args.seed + rank)
    train, held_out = random_split(pool, [320, 80])
    model = DDP(RingNet())
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch // world, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for atoms, bonds, ring in loader:
            loss = F.binary_cross_entropy_with_logits(model(atoms, bonds), ring)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        value, accuracy = validate(model.module, held_out, rank, world)
        if rank == 0:
            mean = total.item() / world / len(loader)
            print(f"epoch {epoch}: train {mean:.4f}, validation {value:.4f}, accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
