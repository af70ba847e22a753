"""Metric learning with an additive margin and learnable class centres."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class CosFace(nn.Module):
    def __init__(self, dim, classes, s=8.0, m=0.1):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(classes, dim))
        self.s, self.m = s, m

    def forward(self, features, labels):
        cosine = F.linear(F.normalize(features), F.normalize(self.centres))
        margin = self.m * F.one_hot(labels, cosine.shape[1])
        return F.cross_entropy(self.s * (cosine - margin), labels)


def faces():
    g = torch.Generator().manual_seed(5)
    y = torch.randint(0, 6, (96,), generator=g)
    return TensorDataset(torch.randn(6, 16, generator=g)[y] + 0.8 * torch.randn(96, 16, generator=g), y)


def prepare():
    torch.manual_seed(7)
    backbone = DDP(nn.Sequential(nn.Linear(16, 32), nn.PReLU(), nn.Linear(32, 8)))
    criterion = CosFace(8, 6)
    params = [{"params": backbone.parameters()}, {"params": criterion.parameters(), "lr": 0.1}]
    return backbone, criterion, torch.optim.SGD(params, lr=0.02, momentum=0.9, weight_decay=5e-4)


def main():
    dist.init_process_group("gloo")
    data = faces()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16 // dist.get_world_size(), sampler=sampler)
    backbone, criterion, optimizer = prepare()
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = criterion(backbone(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
