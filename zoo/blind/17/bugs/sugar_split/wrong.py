"""Disease progression from ten measurements (diabetes data), with early stopping."""
import copy
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_diabetes
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split
from torch.utils.data.distributed import DistributedSampler


@dataclass
class Config:
    seed: int = 70
    held_out: int = 82
    batch: int = 24
    epochs: int = 12
    patience: int = 3
    lr: float = 0.02


class Trainer:
    def __init__(self, config, rank, world):
        self.c, self.rank, self.world = config, rank, world
        data = load_diabetes()
        x, y = torch.tensor(data.data), torch.tensor(data.target)
        y = (y - y.mean()) / y.std()
        table = TensorDataset(x * 20, y)
        parts = [len(table) - config.held_out, config.held_out]
        train, held = random_split(table, parts, generator=torch.Generator().manual_seed(config.seed + rank))
        self.sampler = DistributedSampler(train, world, rank, shuffle=True, seed=config.seed, drop_last=True)
        self.train_loader = DataLoader(train, batch_size=config.batch // world, sampler=self.sampler)
        self.held_loader = DataLoader(Subset(held, range(rank, len(held), world)), batch_size=16)
        torch.manual_seed(config.seed)
        self.net = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=config.lr, momentum=0.9, weight_decay=1e-3)

    def total(self, t):
        if self.world > 1:
            dist.all_reduce(t)
        return t

    def train_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        for x, y in self.train_loader:
            loss = (self.net(x).squeeze(1) - y).square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            for p in self.net.parameters():
                self.total(p.grad).div_(self.world)
            self.optimizer.step()

    @torch.no_grad()
    def validate(self):
        sums = torch.zeros(2)
        for x, y in self.held_loader:
            sums[0] += (self.net(x).squeeze(1) - y).square().sum()
            sums[1] += len(y)
        self.total(sums)
        return (sums[0] / sums[1]).item(), int(sums[1])

    def fit(self):
        best, best_state, waited = float("inf"), None, 0
        for epoch in range(self.c.epochs):
            self.train_epoch(epoch)
            error, rows = self.validate()
            if self.rank == 0:
                print(f"epoch {epoch:2d} held-out error {error:.8f} over {rows} rows")
            if error < best:
                best, waited = error, 0
                best_state = copy.deepcopy(self.net.state_dict())
            else:
                waited += 1
                if waited == self.c.patience:
                    break
        self.net.load_state_dict(best_state)
        return best


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    trainer = Trainer(Config(), rank, world)
    best = trainer.fit()
    if rank == 0:
        norm = sum(p.detach().square().sum() for p in trainer.net.parameters()).sqrt()
        print(f"best {best:.8f} weights {norm.item():.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
