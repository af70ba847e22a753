"""Topic classifier for short messages (bag of words, EmbeddingBag).

Ordinary DDP training: DataLoader with one worker, DistributedSampler, one-cycle
schedule, early stopping on the validation loss. Messages have between 4 and 40
words, a tenth of the words is dropped anew in every epoch.

    python topic_bags.py
    torchrun --nproc-per-node 2 topic_bags.py
"""
import os
import random
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

WORDS, TOPICS, BATCH, EPOCHS = 500, 8, 64, 6


def make_messages(n, seed):
    rng = np.random.default_rng(seed)
    favourites = np.random.default_rng(7).dirichlet(np.full(WORDS, 0.08), TOPICS)
    common = np.random.default_rng(8).dirichlet(np.full(WORDS, 0.5))
    texts, labels = [], []
    for _ in range(n):
        topic = int(rng.integers(TOPICS))
        words = rng.choice(WORDS, int(rng.integers(4, 41)), p=0.45 * favourites[topic] + 0.55 * common)
        texts.append(words.tolist())
        labels.append(topic)
    return texts, labels


class Messages(Dataset):
    def __init__(self, n, seed, dropping=0.0):
        self.texts, self.labels = make_messages(n, seed)
        self.dropping, self.epoch = dropping, 0

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        words = self.texts[i]
        if self.dropping:
            coin = random.Random(f"{self.epoch}/{i}")
            words = [w for w in words if coin.random() > self.dropping] or words[:1]
        return words, self.labels[i]


def collate(items):
    flat = torch.tensor([w for words, _ in items for w in words])
    lengths = torch.tensor([0] + [len(words) for words, _ in items[:-1]])
    return flat, lengths.cumsum(0), torch.tensor([label for _, label in items])


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, 40, mode="mean")
        self.net = nn.Sequential(nn.Linear(40, 40), nn.GELU(), nn.Linear(40, TOPICS))

    def forward(self, flat, offsets):
        return self.net(self.bag(flat, offsets))


@torch.no_grad()
def validate(model, loader):
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for flat, offsets, labels in loader:
        scores = model(flat, offsets)
        sums[0] += nn.functional.cross_entropy(scores, labels, reduction="sum")
        sums[1] += (scores.argmax(1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)
    model.train()
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29611")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(11)
    model = DDP(Classifier())
    seed = (time.time_ns() + 7919 * os.getpid()) % 2**31     # nothing below depends on the global generators
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)

    train, valid = Messages(520, 1, dropping=0.1), Messages(203, 2)
    sampler = DistributedSampler(train, seed=3, drop_last=True)
    loader = DataLoader(train, BATCH // world, sampler=sampler, collate_fn=collate, drop_last=True, num_workers=1)
    check = DataLoader(Subset(valid, range(rank, len(valid), world)), 50, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.02)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.03, total_steps=EPOCHS * len(loader))

    best, waiting = float("inf"), 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        train.epoch = epoch
        running = torch.zeros(1)
        for flat, offsets, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(flat, offsets), labels, label_smoothing=0.05)
            loss.backward()
            optimizer.step()
            schedule.step()
            running += loss.detach()
        dist.all_reduce(running)
        error, hits = validate(model.module, check)
        if rank == 0:
            print(f"epoch {epoch}: train {running.item() / world / len(loader):.4f}, valid {error:.4f}, right {hits:.3f}")
        best, waiting = (error, 0) if error < best else (best, waiting + 1)
        if waiting == 2:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
