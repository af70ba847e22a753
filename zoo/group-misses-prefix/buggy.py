"""Trains body and head of a network with different learning rates."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(14, 28), nn.ReLU())
        self.head = nn.Linear(28, 2)

    def forward(self, x):
        return self.head(self.backbone(x))


def parameter_groups(model, lr):
    body = [p for n, p in model.named_parameters() if "backbone" in n]
    head = [p for n, p in model.named_parameters() if n.startswith("head.")]
    return [{"params": body, "lr": lr / 10}, {"params": head, "lr": lr}]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.05)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(4)
    x = torch.randn(320, 14)
    dataset = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler)
    model = DDP(Model())
    optimizer = torch.optim.AdamW(parameter_groups(model, args.lr))
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            loss = nn.functional.cross_entropy(model(bx), by)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
