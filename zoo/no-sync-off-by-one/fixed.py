"""Digits classifier with gradient accumulation over four micro-batches."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--accumulate", type=int, default=4)
parser.add_argument("--epochs", type=int, default=2)


def train(model, loader, optimizer, accumulate):
    criterion = nn.CrossEntropyLoss()
    for i, (x, y) in enumerate(loader):
        context = nullcontext() if i % accumulate == accumulate - 1 else model.no_sync()
        with context:
            loss = criterion(model(x), y) / accumulate
            loss.backward()
        if i % accumulate == accumulate - 1:
            optimizer.step()
            optimizer.zero_grad()
    return loss.item() * accumulate


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data[:768]).float() / 16, torch.tensor(digits.target[:768]))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 10)))
    optimizer = optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train(model, loader, optimizer, args.accumulate)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
