"""Two-level hand-written averaging: first within a node, then between nodes."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def node_group(ranks_per_node):
    mine = None
    for first in range(0, dist.get_world_size(), ranks_per_node):
        ranks = list(range(first, first + ranks_per_node))
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def average(model, group):
    for p in model.parameters():
        p.grad /= dist.get_world_size()
        dist.all_reduce(p.grad, group=group)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks-per-node", type=int, default=1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    group = node_group(args.ranks_per_node)
    torch.manual_seed(0)
    x = torch.randn(240, 9)
    dataset = TensorDataset(x, x.abs().mean(1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=15, sampler=sampler)
    model = nn.Sequential(nn.Linear(9, 27), nn.ReLU(), nn.Linear(27, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(bx), by)
            loss.backward()
            average(model, group)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
