"""Trains a two-headed network; the second head is trained in a later stage."""

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(12, 24), nn.ReLU())
        self.classes = nn.Linear(24, 3)
        self.boxes = nn.Linear(24, 4)

    def forward(self, x, stage):
        h = self.trunk(x)
        return self.classes(h) if stage == 1 else self.boxes(h)


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(0)
    x = torch.randn(192, 12)
    y = x[:, :3].argmax(1)
    dataset = TensorDataset(x, y)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = DDP(TwoHeads())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(bx, stage=1), by)
            loss.backward()
            optimizer.step()
        if os.environ["RANK"] == "0":
            print(f"epoch {epoch} loss {loss:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
