"""Recommendation: ratings from factors of users and items plus biases."""
import os
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Settings:
    users: int = 80
    items: int = 50
    rank: int = 6
    ratings: int = 2048
    batch: int = 128
    epochs: int = 3
    lr: float = 2.0


class Factors(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.user = nn.Embedding(s.users, s.rank)
        self.item = nn.Embedding(s.items, s.rank)
        self.user_bias = nn.Embedding(s.users, 1)
        self.item_bias = nn.Embedding(s.items, 1)
        for e in (self.user, self.item):
            nn.init.normal_(e.weight, std=0.3)
        for e in (self.user_bias, self.item_bias):
            nn.init.zeros_(e.weight)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(1) + self.user_bias(u).squeeze(1) + self.item_bias(i).squeeze(1)


def make_ratings(s):
    rng = np.random.default_rng(31)
    u = rng.integers(0, s.users, s.ratings)
    i = rng.integers(0, s.items, s.ratings)
    a, b = rng.normal(size=(s.users, 3)), rng.normal(size=(s.items, 3))
    r = (a[u] * b[i]).sum(1) + 0.3 * rng.normal(size=s.ratings)
    return TensorDataset(torch.tensor(u), torch.tensor(i), torch.tensor(r, dtype=torch.float32))


def train_step(model, optimizer, batch):
    u, i, r = batch
    optimizer.zero_grad(set_to_none=True)
    loss = nn.functional.mse_loss(model(u, i), r)
    loss.backward()
    optimizer.step()
    loss = loss.detach()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def main():
    s = Settings()
    if "RANK" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    model = DistributedDataParallel(Factors(s))
    optimizer = torch.optim.SGD(model.parameters(), lr=s.lr)
    ratings = make_ratings(s)
    sampler = DistributedSampler(ratings, seed=3)
    loader = DataLoader(ratings, batch_size=s.batch // world, sampler=sampler)
    for epoch in range(s.epochs):
        sampler.set_epoch(epoch)
        losses = [train_step(model, optimizer, batch) for batch in loader]
        if rank == 0:
            print(f"epoch {epoch} rmse {np.sqrt(np.mean(losses)):.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
