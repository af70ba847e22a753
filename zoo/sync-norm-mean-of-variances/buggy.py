"""An MLP with a batch normalisation over all ranks."""

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class CrossRankNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim)), eps

    def forward(self, x):
        world = dist.get_world_size()
        mean = dist_nn.all_reduce(x.mean(0)) / world
        var = dist_nn.all_reduce(x.var(0, unbiased=False)) / world
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(7)
    x = torch.randn(96, 6, generator=g)
    data = TensorDataset(x, (x[:, :2] ** 2).sum(1, keepdim=True))
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16 // dist.get_world_size(), sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(6, 24), CrossRankNorm(24), nn.ReLU(), nn.Linear(24, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for inputs, target in loader:
            loss = nn.functional.mse_loss(model(inputs), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
