"""Trains with an exponential moving average of the weights and evaluates the average."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class ModelEma:
    def __init__(self, model, decay=0.9):
        self.module = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for average, value in zip(self.module.parameters(), model.parameters(), strict=True):
            average.lerp_(value, 1 - self.decay)


def blobs(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    centres = torch.tensor([[2.0, 0], [-2, 0], [0, 2], [0, -2]])
    return TensorDataset(centres[y] + torch.randn(n, 2, generator=g), y)


@torch.no_grad()
def accuracy(model, dataset, rank, world_size):
    x, y = dataset.tensors
    x, y = x[rank::world_size], y[rank::world_size]
    right = (model(x).argmax(1) == y).sum()
    dist.all_reduce(right)
    return right.item() / len(dataset)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 4))
    model = DDP(net)
    ema = ModelEma(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    train_set, test_set = blobs(256, seed=1), blobs(200, seed=2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            ema.update(net)
        result = accuracy(ema.module, test_set, rank, world_size)
        if rank == 0:
            print(f"epoch {epoch}: accuracy of the average {result:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
