#!/usr/bin/env python
"""Token tagging of bookkeeping entries (amount, payee, account, other) with a small conv tagger.

Entries are between 3 and 40 tokens long; pieces of a word after the first one carry the label
-100, as do the padding tokens, and are not scored.
"""
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

VOCAB, TAGS, LENGTH, IGNORE = 60, 4, 40, -100


def entries(n, seed):
    rng = np.random.default_rng(seed)
    home = np.random.default_rng(99).integers(0, TAGS, VOCAB)
    tokens = np.zeros((n, LENGTH), dtype=np.int64)
    labels = np.full((n, LENGTH), IGNORE)
    for row in range(n):
        size = int(np.clip(rng.pareto(0.9) * 4 + 3, 3, LENGTH))
        words = rng.integers(1, VOCAB, size)
        tag = home[words].copy()
        after = np.flatnonzero(words[:-1] % 7 == 0) + 1        # a cue word turns the next tag
        tag[after] = (tag[after] + 1) % TAGS
        wrong = rng.random(size) < 0.03
        tag[wrong] = rng.integers(0, TAGS, wrong.sum())
        tag[(rng.random(size) < 0.25) & (np.arange(size) > 0)] = IGNORE
        tokens[row, :size], labels[row, :size] = words, tag
    return TensorDataset(torch.tensor(tokens), torch.tensor(labels))


class Tagger(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width, padding_idx=0)
        self.mix = nn.ModuleList(nn.Conv1d(width, width, 3, padding=1) for _ in range(2))
        self.head = nn.Linear(width, TAGS)

    def forward(self, tokens):
        h = self.embed(tokens).transpose(1, 2)
        for conv in self.mix:
            h = h + torch.relu(conv(h))
        return self.head(h.transpose(1, 2))


def token_loss(logits, labels):
    scored = (labels != IGNORE).sum()
    dist.all_reduce(scored)
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return total * dist.get_world_size() / scored


@torch.no_grad()
def evaluate(model, data):
    tokens, labels = data.tensors
    scored = labels != IGNORE
    hits = (model(tokens).argmax(-1) == labels)[scored]
    return hits.double().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32, help="entries per step, of all processes")
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--width", type=int, default=24)
    args = parser.parse_args()

    for key, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29613").items():
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    train, test = entries(256, seed=0), entries(128, seed=1)
    sampler = DistributedSampler(train, seed=2)
    loader = DataLoader(train, args.batch // world, sampler=sampler)

    torch.manual_seed(1)
    net = DDP(Tagger(args.width))
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.8)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        logged = torch.zeros(1)
        for tokens, labels in loader:
            loss = token_loss(net(tokens), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            logged += loss.detach()
        dist.all_reduce(logged)
        accuracy = evaluate(net.module, test)
        if rank == 0:
            print(f"epoch {epoch} loss {logged.item() / len(loader) / world:.4f} test accuracy {accuracy:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
