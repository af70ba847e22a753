"""Adversarially robust digits: TRADES (clean cross-entropy + divergence under attack).

The attack (three projected gradient steps within an L2 ball) is made on the bare
network in eval mode; clean and attacked pictures then go through DDP in one pass. An
exponential average of the weights is what gets tested.
"""
import argparse
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Digits(Dataset):
    def __init__(self, part):
        x, y = load_digits(return_X_y=True)
        order = np.random.default_rng(0).permutation(len(x))
        rows = order[:1200] if part == "train" else order[1200:]
        self.x = torch.tensor(x[rows], dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.y = torch.tensor(y[rows])

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return i, self.x[i], self.y[i]


def network():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.SiLU(), nn.Conv2d(12, 16, 3, stride=2, padding=1), nn.SiLU(),
        nn.Flatten(), nn.Linear(16 * 16, 48), nn.SiLU(), nn.Linear(48, 10))


def inside(delta, radius):
    norm = delta.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1, 1)
    return delta * (radius / norm).clamp(max=1.0)


def attack(net, x, target, start, radius, steps, divergence):
    """target: probabilities of the clean pictures, or labels."""
    delta = inside(start, radius)
    for _ in range(steps):
        delta.requires_grad_(True)
        scores = net(x + delta)
        loss = (F.kl_div(F.log_softmax(scores, 1), target, reduction="sum") if divergence
                else F.cross_entropy(scores, target, reduction="sum"))
        slope, = torch.autograd.grad(loss, [delta])
        slope = slope / slope.flatten(1).norm(dim=1).clamp(min=1e-6).view(-1, 1, 1, 1)
        delta = inside(delta.detach() + 0.5 * radius * slope, radius)
    return (x + delta).clamp(0, 1)


def noise(epoch, rows):
    return torch.stack([torch.randn(1, 8, 8, generator=torch.Generator().manual_seed(epoch * 10_000 + int(r)))
                        for r in rows])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch-size", type=int, default=100, help="of all processes together")
    p.add_argument("--radius", type=float, default=0.6)
    p.add_argument("--beta", type=float, default=2.0)
    args = p.parse_args()
    distributed = "WORLD_SIZE" in os.environ
    if distributed:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if distributed else (0, 1)

    torch.manual_seed(21)
    net = network()
    model = DDP(net) if distributed else net
    torch.manual_seed(21 + 1000 * rank)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, eps=1e-5, weight_decay=1e-3)
    train, test = Digits("train"), Digits("test")
    sampler = DistributedSampler(train, world, rank, seed=9)
    loader = DataLoader(train, args.batch_size // world, sampler=sampler)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for rows, x, y in loader:
            net.eval()
            with torch.no_grad():
                clean = net(x).softmax(1)
            bad = attack(net, x, clean, 0.1 * noise(epoch, rows), args.radius, 3, True)
            net.train()
            scores, attacked = model(torch.cat([x, bad])).chunk(2)
            loss = F.cross_entropy(scores, y) + args.beta * F.kl_div(
                F.log_softmax(attacked, 1), scores.softmax(1), reduction="batchmean")
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            average.update_parameters(net)

        average.eval()
        sums = torch.zeros(3, dtype=torch.float64)
        x, y = test.x[rank::world], test.y[rank::world]
        bad = attack(average, x, y, torch.zeros_like(x), args.radius, 3, False)
        with torch.no_grad():
            sums += torch.tensor([len(x), (average(x).argmax(1) == y).sum(), (average(bad).argmax(1) == y).sum()])
        if distributed:
            dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch}: clean {sums[1] / sums[0]:.4f}, attacked {sums[2] / sums[0]:.4f}")
    if distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
