"""Balanced sampling with replacement: one common draw per epoch, dealt out to the ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class DistributedWeightedSampler(Sampler):
    def __init__(self, weights, rank, world_size, seed=0):
        self.weights, self.rank, self.world_size, self.seed = weights, rank, world_size, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.weights) // self.world_size

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        drawn = torch.multinomial(self.weights, len(self) * self.world_size, replacement=True, generator=g)
        return iter(drawn[self.rank :: self.world_size].tolist())


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    y = (torch.rand(320) < 0.15).long()
    dataset = TensorDataset(torch.randn(320, 6) + y[:, None], y)
    weights = 1.0 / torch.bincount(y).float()[y]
    sampler = DistributedWeightedSampler(weights, dist.get_rank(), dist.get_world_size())
    loader = DataLoader(dataset, batch_size=20, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
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
