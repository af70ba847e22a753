"""Word vectors by skip-gram with negative sampling. The tables give sparse gradients and are trained with SparseAdam,
the small dense part with Adam.
"""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS, TOPICS, NEGATIVES = 120, 6, 5
BATCH, EPOCHS = 256, 3


class Pairs(Dataset):
    """(centre, context, negatives); the negatives of a pair belong to the epoch and the pair."""

    def __init__(self, sentences, size):
        counts = np.bincount(sentences.ravel(), minlength=WORDS) ** 0.75
        self.noise = counts / counts.sum()
        pairs = [(s[i], s[j]) for s in sentences for i in range(len(s)) for j in range(max(0, i - 2), min(len(s), i + 3)) if i != j]
        self.pairs = np.array(pairs)[np.random.default_rng(1).permutation(len(pairs))[:size]]
        self.epoch = 0

    def __len__(self):
        return len(self.pairs)

    def __getitem__(self, i):
        rng = np.random.default_rng([self.epoch, i])
        return (*self.pairs[i], rng.choice(WORDS, NEGATIVES, p=self.noise))


def make_sentences(n=300, length=8):
    rng = np.random.default_rng(0)
    topics = rng.dirichlet(np.full(WORDS, 0.1), TOPICS)
    return np.stack([rng.choice(WORDS, length, p=topics[rng.integers(TOPICS)]) for _ in range(n)])


class SkipGram(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.centre = nn.Embedding(WORDS, width, sparse=True)
        self.context = nn.Embedding(WORDS, width, sparse=True)
        self.mix = nn.Linear(width, width)
        nn.init.uniform_(self.centre.weight, -0.5, 0.5)
        nn.init.uniform_(self.context.weight, -0.5, 0.5)

    def forward(self, word, others):
        return torch.einsum("bw,bow->bo", self.mix(self.centre(word)), self.context(others))


def nce(scores):
    """First column is the true context, the others are noise."""
    return (F.softplus(-scores[:, 0]) + F.softplus(scores[:, 1:]).sum(1)).mean()


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    distributed = world > 1
    if distributed:
        dist.init_process_group("gloo")
    torch.manual_seed(1 + rank)
    data = Pairs(make_sentences(), 16 * BATCH)
    sampler = DistributedSampler(data, world, rank, seed=6)
    loader = DataLoader(data, BATCH // world, sampler=sampler)

    net = SkipGram()
    model = DDP(net) if distributed else net
    tables = torch.optim.SparseAdam([net.centre.weight, net.context.weight], lr=0.03, eps=1e-5)
    dense = torch.optim.Adam(net.mix.parameters(), lr=0.01, eps=1e-5)
    touched = set()                                            # words this process has seen as centres
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        data.epoch = epoch
        meter = 0.0
        for word, context, noise in loader:
            touched.update(word.tolist())
            others = torch.cat([context[:, None], noise], 1)
            loss = nce(model(word, others))
            tables.zero_grad()
            dense.zero_grad()
            loss.backward()
            tables.step()
            dense.step()
            meter += loss.item()
        stats = torch.tensor([meter / len(loader)])
        seen = torch.zeros(WORDS)
        seen[list(touched)] = 1
        if distributed:
            dist.all_reduce(stats)
            dist.all_reduce(seen, op=dist.ReduceOp.MAX)
        if rank == 0:
            length = net.centre.weight.detach().norm(dim=1)
            print(f"epoch {epoch} loss {stats.item() / world:.4f} words {int(seen.sum())} longest {length.max():.4f}")
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
