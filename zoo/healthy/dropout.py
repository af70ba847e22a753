"""Dropout with a stream of its own on every rank."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(args.seed * 1000 + dist.get_rank())
    x = torch.randn(256, 20, generator=torch.Generator().manual_seed(0))
    dataset = TensorDataset(x, (x.sum(1) > 0).long())
    sampler = DistributedSampler(dataset, seed=args.seed)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    net = nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 2))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(bx), by)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
