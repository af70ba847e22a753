"""Digit-like classification, started from the command line."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--num_workers", type=int, default=2)
    return parser.parse_args()


def digits():
    g = torch.Generator().manual_seed(10)
    y = torch.arange(96) % 6
    x = torch.randn(6, 25, generator=g)[y] + 0.9 * torch.randn(96, 25, generator=g)
    return TensorDataset(x.view(-1, 1, 5, 5), y)


def main(args):
    dist.init_process_group(backend="gloo")
    torch.manual_seed(2)
    dataset = digits()
    sampler = DistributedSampler(dataset, num_replicas=dist.get_world_size(), rank=args.local_rank)
    loader = DataLoader(
        dataset, args.batch_size, sampler=sampler, num_workers=args.num_workers, persistent_workers=True
    )
    model = DistributedDataParallel(nn.Sequential(nn.Flatten(), nn.Linear(25, 32), nn.ReLU(), nn.Linear(32, 6)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y, label_smoothing=0.1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if args.local_rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(parse())
