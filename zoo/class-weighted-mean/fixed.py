"""Unbalanced classification of tabular rows with class weights."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Trainer:
    def __init__(self, model, data, optimizer, criterion, batch_size):
        self.rank = int(os.environ["RANK"])
        self.world = dist.get_world_size()
        self.model = DDP(model)
        self.optimizer = optimizer
        self.criterion = criterion
        self.sampler = DistributedSampler(data, shuffle=True)
        self.loader = DataLoader(data, batch_size=batch_size, sampler=self.sampler)

    def compute_loss(self, logits, target):
        total = self.criterion.weight[target].sum()
        dist.all_reduce(total)
        per_row = nn.functional.cross_entropy(logits, target, self.criterion.weight, reduction="sum")
        return per_row * self.world / total

    def run_batch(self, x, y):
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.compute_loss(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def run_epoch(self, epoch):
        self.sampler.set_epoch(epoch)
        losses = [self.run_batch(x, y) for x, y in self.loader]
        if self.rank == 0:
            print(f"[{epoch}] {sum(losses) / len(losses):.4f}")

    def train(self, epochs):
        for epoch in range(epochs):
            self.run_epoch(epoch)


def load_objects():
    g = torch.Generator().manual_seed(11)
    x = torch.randn(96, 10, generator=g)
    y = torch.multinomial(torch.tensor([0.7, 0.2, 0.1]), 96, replacement=True, generator=g)
    counts = torch.bincount(y, minlength=3).float()
    weights = counts.sum() / (3 * counts)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return TensorDataset(x, y), model, optimizer, nn.CrossEntropyLoss(weight=weights)


def main(epochs=3, batch_size=16):
    dist.init_process_group("gloo")
    data, model, optimizer, criterion = load_objects()
    Trainer(model, data, optimizer, criterion, batch_size // dist.get_world_size()).train(epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
