"""Gradient accumulation with no_sync on all but the last micro-batch of a window."""

import argparse
from contextlib import nullcontext

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data[:768]).float() / 16, torch.tensor(digits.target[:768]))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader, start=1):
            last = i % args.accumulate == 0
            with nullcontext() if last else model.no_sync():
                loss = F.cross_entropy(model(x), y) / args.accumulate
                loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item() * args.accumulate:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
