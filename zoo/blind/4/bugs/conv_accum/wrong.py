"""Convolutional digits classifier with a large effective batch, reached by accumulating micro-batches."""
import argparse
import contextlib
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--micro-batch", type=int, default=32, help="samples per micro-batch, all processes together")
    p.add_argument("--accumulate", type=int, default=4)
    p.add_argument("--lr", type=float, default=0.08)
    p.add_argument("--seed", type=int, default=2)
    return p.parse_args()


def network():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(96, 10),
    )


def windows(total, k):
    """Length of the accumulation window every micro-batch belongs to."""
    return [min(k, total - i // k * k) for i in range(total)]


def train_epoch(model, loader, optimizer, k):
    last = len(loader) - 1
    lengths = windows(len(loader), k)
    updates, running = 0, 0.0
    for i, (x, y) in enumerate(loader):
        boundary = (i + 1) % k == 0
        context = contextlib.nullcontext() if boundary else model.no_sync()
        with context:
            loss = F.cross_entropy(model(x), y) / lengths[i]
            loss.backward()
        running += loss.item() * lengths[i]
        if boundary or i == last:
            optimizer.step()
            optimizer.zero_grad()
            updates += 1
    return running / len(loader), updates


@torch.no_grad()
def evaluate(net, x, y):
    return (net(x).argmax(1) == y).float().mean().item()


def main():
    args = parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    train, test = (x[:1472], y[:1472]), (x[1472:], y[1472:])

    dataset = TensorDataset(*train)
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, batch_size=args.micro_batch // world, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    model = DDP(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss, updates = train_epoch(model, loader, optimizer, args.accumulate)
        acc = evaluate(model.module, *test)
        if rank == 0:
            print(f"epoch {epoch}: {updates} updates, loss {loss:.4f}, accuracy {acc:.4f}")

    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
