"""Regression on the diabetes data with gradient accumulation."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def load_data(n):
    data = load_diabetes()
    x = torch.tensor(data.data[:n], dtype=torch.float32) * 20
    y = torch.tensor(data.target[:n], dtype=torch.float32).unsqueeze(1) / 100
    return TensorDataset(x, y)


def train_one_epoch(model, loader, optimizer, accumulate):
    batches = len(loader)
    optimizer.zero_grad()
    for index, (x, y) in enumerate(loader, start=1):
        window = accumulate if index <= batches - batches % accumulate else batches % accumulate
        loss = nn.functional.mse_loss(model(x), y)
        (loss / window).backward()
        if index % accumulate == 0 or index == batches:
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = load_data(440)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        loss = train_one_epoch(model, loader, optimizer, args.accumulate)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
