"""A trainer with validation, early stopping and a reduced F1 score."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


@dataclass
class Config:
    epochs: int = 8
    batch: int = 24
    patience: int = 2
    lr: float = 0.3


class EarlyStopping:
    def __init__(self, patience):
        self.patience, self.best, self.bad = patience, float("inf"), 0

    def __call__(self, value):
        if value < self.best - 1e-4:
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience


class F1:
    def __init__(self):
        self.counts = torch.zeros(3)

    def add(self, pred, target):
        self.counts += torch.stack([(pred & target).sum(), (pred & ~target).sum(), (~pred & target).sum()]).float()

    def result(self):
        counts = self.counts.clone()
        dist.all_reduce(counts)
        tp, fp, fn = counts.tolist()
        return 2 * tp / max(2 * tp + fp + fn, 1)


class Trainer:
    def __init__(self, config):
        self.config = config
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        g = torch.Generator().manual_seed(14)
        x = torch.randn(155, 6, generator=g)
        y = (x[:, :2].sum(1) + 0.5 * torch.randn(155, generator=g) > 0.5).float()
        whole = TensorDataset(x, y)
        self.train_set, self.val_set = Subset(whole, range(120)), Subset(whole, range(120, 155))
        self.sampler = DistributedSampler(self.train_set)
        self.train_loader = DataLoader(self.train_set, config.batch // self.world, sampler=self.sampler)
        self.val_loader = DataLoader(Subset(self.val_set, range(self.rank, 35, self.world)), 8)
        self.model = DDP(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)))
        self.optimizer = torch.optim.Adagrad(self.model.parameters(), lr=config.lr)
        self.stop = EarlyStopping(config.patience)

    def train_epoch(self, epoch):
        self.model.train()
        self.sampler.set_epoch(epoch)
        for x, y in self.train_loader:
            self.optimizer.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(self.model(x).squeeze(-1), y).backward()
            self.optimizer.step()

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        f1, sums = F1(), torch.zeros(2)
        for x, y in self.val_loader:
            out = self.model.module(x).squeeze(-1)
            sums += torch.tensor(
                [nn.functional.binary_cross_entropy_with_logits(out, y, reduction="sum").item(), len(y)]
            )
            f1.add(out > 0, y.bool())
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item(), f1.result()

    def fit(self):
        for epoch in range(self.config.epochs):
            self.train_epoch(epoch)
            loss, f1 = self.validate()
            if self.rank == 0:
                print(f"epoch {epoch} val loss {loss:.4f} f1 {f1:.4f}")
            if self.stop(loss):
                break


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(Config()).fit()
    dist.destroy_process_group()
