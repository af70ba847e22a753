"""MoCo on the digits: a query encoder, a momentum encoder and a queue of old keys as negatives."""
import argparse
import copy
import os
from collections import deque

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--queue", type=int, default=6, help="old batches kept")
    p.add_argument("--momentum", type=float, default=0.95)
    p.add_argument("--temperature", type=float, default=0.2)
    return p.parse_args()


class TwoViews(Dataset):
    def __init__(self, images):
        self.images, self.epoch = images, 0

    def __len__(self):
        return len(self.images)

    def view(self, i, which):
        rng = np.random.default_rng([17, self.epoch, i, which])
        image = np.roll(self.images[i], rng.integers(-1, 2, size=2), axis=(0, 1))
        return torch.tensor(image * rng.uniform(0.7, 1.3) + 0.1 * rng.normal(size=image.shape), dtype=torch.float32)

    def __getitem__(self, i):
        return self.view(i, 0), self.view(i, 1)


class Encoder(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, stride=2, padding=1)
        self.conv2 = nn.Conv2d(12, 24, 3, stride=2, padding=1)
        self.fc = nn.Linear(96, dim)

    def forward(self, x):
        x = F.elu(self.conv2(F.elu(self.conv1(x[:, None]))))
        return F.normalize(self.fc(x.flatten(1)), dim=1)


class MoCo:
    """Momentum encoder and queue, kept by hand on every process."""

    def __init__(self, encoder, args):
        self.keys = copy.deepcopy(encoder).requires_grad_(False)
        self.momentum = args.momentum
        start = F.normalize(torch.randn(args.queue, args.batch, 16, generator=torch.Generator().manual_seed(0)), dim=2)
        self.queue = deque(start, maxlen=args.queue)

    @torch.no_grad()
    def update(self, encoder):
        for k, q in zip(self.keys.parameters(), encoder.parameters()):
            k.lerp_(q, 1 - self.momentum)

    @torch.no_grad()
    def push(self, keys, world):
        pieces = [torch.empty_like(keys) for _ in range(world)]
        dist.all_gather(pieces, keys)
        self.queue.append(torch.cat(pieces))            # by process: another order than on one, same set of keys


@torch.no_grad()
def neighbours(encoder, bank, bank_y, x, y, rank, world):
    mine = slice(rank, None, world)
    similar = encoder(x[mine]) @ encoder(bank).T
    votes = (similar / 0.05).softmax(1)
    right = (votes * (bank_y == y[mine][:, None])).sum(dtype=torch.float64)
    dist.all_reduce(right)
    return right.item() / len(x)


def main():
    args = get_args()
    for k, v in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29616"}.items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    digits = load_digits()
    images, labels = digits.images / 16, torch.tensor(digits.target)
    train = TwoViews(images[:1024])
    plain = torch.tensor(images, dtype=torch.float32)
    sampler = DistributedSampler(train, seed=2)
    loader = DataLoader(train, args.batch // world, sampler=sampler, drop_last=True)

    model = DDP(Encoder())
    moco = MoCo(model.module, args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * len(loader))
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        train.epoch = epoch
        total = torch.zeros(())
        for one, two in loader:
            moco.update(model.module)
            with torch.no_grad():
                keys = moco.keys(two)
            queries = model(one)
            positive = (queries * keys).sum(1, keepdim=True)
            negative = queries @ torch.cat(list(moco.queue)).T
            logits = torch.cat([positive, negative], 1) / args.temperature
            loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            moco.push(keys, world)
            total += loss.detach() / len(loader)
        dist.all_reduce(total)
        score = neighbours(moco.keys, plain[:1024], labels[:1024], plain[1024:], labels[1024:], rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / world:.4f} votes for the class {score:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
