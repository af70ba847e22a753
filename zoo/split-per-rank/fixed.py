"""Splits digits at random into training and validation sets."""

import argparse

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset, random_split


@torch.no_grad()
def validate(net, dataset, rank, world_size):
    counts = torch.zeros(2)
    for i in range(rank, len(dataset), world_size):
        x, y = dataset[i]
        counts += torch.tensor([float(net(x.unsqueeze(0)).argmax(1) == y), 1.0])
    dist.all_reduce(counts)
    return (counts[0] / counts[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)
    digits = load_digits()
    full = TensorDataset(torch.tensor(digits.data[:600]).float() / 16, torch.tensor(digits.target[:600]))
    train_set, valid_set = random_split(full, [480, 120], torch.Generator().manual_seed(args.seed))
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=24, sampler=sampler)
    net = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        accuracy = validate(net, valid_set, rank, world_size)
        if rank == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, valid {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
