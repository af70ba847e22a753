"""Gradient accumulation over four micro-batches, tutorial Trainer style."""

import contextlib
import os

import torch
from torch import nn
from torch.distributed import destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Regression(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(42)
        self.x = torch.randn(size, 20, generator=generator)
        self.y = self.x.sum(1, keepdim=True) + torch.randn(size, 1, generator=generator) * 0.1

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Trainer:
    def __init__(self, model, loader, optimizer, accumulate):
        self.rank = int(os.environ["RANK"])
        self.model = DDP(model)
        self.loader = loader
        self.optimizer = optimizer
        self.accumulate = accumulate

    def _run_epoch(self, epoch):
        self.loader.sampler.set_epoch(epoch)
        model = self.model
        for i, (x, y) in enumerate(self.loader):
            last = (i + 1) % self.accumulate == 0
            with model.no_sync():
                loss = F.mse_loss(model(x), y) / self.accumulate
                loss.backward()
            if last:
                self.optimizer.step()
                self.optimizer.zero_grad()
        if self.rank == 0:
            print(f"epoch {epoch} | loss {loss.item() * self.accumulate:.4f}")

    def train(self, epochs):
        for epoch in range(epochs):
            self._run_epoch(epoch)


def main():
    init_process_group(backend="gloo")
    torch.manual_seed(0)
    dataset = Regression(512)
    model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    loader = DataLoader(dataset, batch_size=8, sampler=DistributedSampler(dataset))
    with contextlib.suppress(KeyboardInterrupt):
        Trainer(model, loader, optimizer, accumulate=4).train(epochs=3)
    destroy_process_group()


if __name__ == "__main__":
    main()
