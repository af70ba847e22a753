"""Small conv net on the digits with DDP and gradient accumulation.

An epoch has ten micro-batches and an update uses four of them; what is left at the end of an epoch makes a
smaller update of its own.
"""
import argparse
import contextlib
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10),
    )


def load_split():
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    target = torch.tensor(bunch.target)
    return TensorDataset(images[:640], target[:640]), TensorDataset(images[640:1152], target[640:1152])


def evaluate(model, data):
    model.eval()
    with torch.no_grad():
        logits = model(data.tensors[0])
    model.train()
    return F.cross_entropy(logits, data.tensors[1]).item(), (logits.argmax(1) == data.tensors[1]).float().mean().item()


def run(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    train_set, test_set = load_split()
    sampler = DistributedSampler(train_set, shuffle=True, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.micro_batch // world, sampler=sampler)
    model = DDP(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)

    n_micro = len(loader)
    tail = n_micro % args.accum
    updates = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            window = tail if i >= n_micro - tail else args.accum
            boundary = (i + 1) % args.accum == 0 or i + 1 == n_micro
            sync = contextlib.nullcontext() if (i + 1) % args.accum == 0 else model.no_sync()
            with sync:
                loss = F.cross_entropy(model(x), y) / window
                loss.backward()
            if boundary:
                optimizer.step()
                optimizer.zero_grad()
                updates += 1
        nll, acc = evaluate(model.module, test_set)
        if rank == 0 and epoch % 3 == 2:
            print(f"epoch {epoch} updates {updates} test nll {nll:.5f} acc {acc:.4f}")
    if rank == 0:
        print(f"done: nll {nll:.5f}")
    return model.module


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--micro-batch", type=int, default=64)
    parser.add_argument("--accum", type=int, default=4)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=17)
    options = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trained = run(options)
    time.sleep(0.3)
    dist.destroy_process_group()
