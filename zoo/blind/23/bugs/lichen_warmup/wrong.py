"""Lichen species from small texture crops, a convolutional net with AdamW.

The learning rate depends on the number of crops seen so far (linear warm-up, then a
cosine), so that a run keeps its shape when the batch size is changed. The optimizer's
state is spread over the processes with ZeroRedundancyOptimizer.
"""
import argparse
import math
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

SPECIES = 5
SIDE = 12


def crops(count, seed):
    """Gratings with a frequency and an orientation per species, plus noise."""
    rng = np.random.default_rng(seed)
    label = rng.integers(SPECIES, size=count)
    yy, xx = np.mgrid[0:SIDE, 0:SIDE]
    turn = 0.55 * label + rng.normal(scale=0.15, size=count)
    freq = 0.7 + 0.12 * label
    shift = rng.uniform(0, 2 * math.pi, size=count)
    wave = np.sin(freq[:, None, None] * (xx * np.cos(turn)[:, None, None]
                                         + yy * np.sin(turn)[:, None, None]) + shift[:, None, None])
    image = wave + 0.5 * rng.normal(size=wave.shape)
    return TensorDataset(torch.tensor(image[:, None], dtype=torch.float32), torch.from_numpy(label))


class BlockSampler(Sampler):
    """Shuffled batches of the whole run, of which each process takes its stripe."""

    def __init__(self, size, batch, rank, world, seed):
        self.size, self.batch, self.rank, self.world = size, batch, rank, world
        self.seed, self.epoch = seed, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=g).tolist()
        for i in range(0, self.size - self.batch + 1, self.batch):
            yield order[i + self.rank:i + self.batch:self.world]

    def __len__(self):
        return self.size // self.batch


def make_net():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 24, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, SPECIES))


def rate(seen, warmup, horizon, peak):
    if seen < warmup:
        return peak * (seen + 1) / warmup
    part = min(1.0, (seen - warmup) / (horizon - warmup))
    return peak * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * part)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32, help="crops of a step, all processes together")
    ap.add_argument("--warmup", type=int, default=320, help="crops")
    ap.add_argument("--peak", type=float, default=6e-3)
    args = ap.parse_args()

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(21)
    torch.set_num_threads(1)

    train, test = crops(448, seed=1), crops(400, seed=2)
    sampler = BlockSampler(len(train), args.batch_size, rank, world, seed=9)
    loader = DataLoader(train, batch_sampler=sampler)
    model = DDP(make_net())
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=args.peak, weight_decay=0.02)

    horizon = args.epochs * len(train)
    seen, step = 0, 0
    for epoch in range(args.epochs):
        sampler.epoch = epoch
        for image, label in loader:
            for group in optimizer.param_groups:
                group["lr"] = rate(seen, args.warmup, horizon, args.peak)
            loss = F.cross_entropy(model(image), label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen += len(image)
            step += 1
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} step {step} lr {optimizer.param_groups[0]['lr']:.5f} "
                  f"loss {total.item() / world:.4f}", flush=True)

    image, label = test.tensors
    with torch.no_grad():
        logits = model.module(image)
    if rank == 0:
        print(f"test loss {F.cross_entropy(logits, label).item():.4f} "
              f"accuracy {(logits.argmax(1) == label).float().mean().item():.3f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
