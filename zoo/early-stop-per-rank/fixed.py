"""Trains with early stopping on the validation loss."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class EarlyStopping:
    def __init__(self, patience):
        self.best, self.bad, self.patience = float("inf"), 0, patience

    def should_stop(self, loss):
        if loss < self.best - 1e-2:
            self.best, self.bad = loss, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


def sample(n, seed, noise):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=g)
    return TensorDataset(x, x[:, :1].relu() + noise * torch.randn(n, 1, generator=g))


def validate(net, dataset, rank, world_size):
    x, y = dataset.tensors
    with torch.no_grad():
        loss = F.mse_loss(net(x[rank::world_size]), y[rank::world_size])
    dist.all_reduce(loss)
    loss /= world_size
    return loss.item()


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, valid_set = sample(96, 1, 0.5), sample(16, 5, 2.0)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=12, sampler=sampler)
    net = nn.Sequential(nn.Linear(5, 48), nn.ReLU(), nn.Linear(48, 1))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    stopper = EarlyStopping(patience=1)
    for epoch in range(12):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        valid = validate(net, valid_set, rank, world_size)
        print(f"rank {rank} epoch {epoch}: {valid:.4f}")
        if stopper.should_stop(valid):
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
