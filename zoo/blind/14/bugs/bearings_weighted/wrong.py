"""Detects worn bearings in short vibration records with a small convolutional network.

One record in twelve or so is from a worn bearing, so records are drawn with weights that make both classes equally
likely. An epoch has 480 draws, a step 48 over all processes.
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

LENGTH = 64


def records(count, seed):
    """Older machines come first: more wear, and a lower hum."""
    g = torch.Generator().manual_seed(seed)
    age = torch.linspace(1, 0, count)
    worn = torch.rand(count, generator=g) < 0.02 + 0.14 * age
    t = torch.arange(LENGTH, dtype=torch.float32)
    phase = 6.28 * torch.rand(count, 1, generator=g)
    hum = torch.sin(t * (0.3 + 0.2 * (1 - age[:, None])) + phase)
    period = torch.randint(9, 15, (count, 1), generator=g)
    start = torch.randint(0, 9, (count, 1), generator=g)
    clicks = ((t - start) % period == 0).float() * 1.5
    noise = 0.7 * torch.randn(count, LENGTH, generator=g)
    return TensorDataset((hum + noise + clicks * worn[:, None])[:, None], worn.float())


class WeightedShareSampler(Sampler):
    """Draws with replacement by weight; every process gets its share of the draws."""

    def __init__(self, weights, draws, rank, world, seed=0):
        self.weights, self.draws = torch.as_tensor(weights), draws
        self.rank, self.world, self.seed, self.epoch = rank, world, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.draws // self.world

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        own = torch.arange(self.rank, len(self.weights), self.world)
        picks = own[torch.multinomial(self.weights[own], len(self), replacement=True, generator=g)]
        return iter(picks.tolist())


class Listener(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, width, 9, padding=4), nn.ReLU(), nn.AvgPool1d(2),
            nn.Conv1d(width, width, 7, padding=3), nn.ReLU())
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        return self.head(self.body(x).amax(-1)).squeeze(-1)


@torch.no_grad()
def evaluate(model, data, rank, world):
    """Mean loss, share of worn bearings found and share of false alarms."""
    x, worn = data[rank::world]
    logits = model(x)
    alarm = (logits > 0).float()
    sums = torch.stack([
        F.binary_cross_entropy_with_logits(logits, worn, reduction="sum"), torch.tensor(float(len(worn))),
        (alarm * worn).sum(), worn.sum(), (alarm * (1 - worn)).sum(), (1 - worn).sum()])
    dist.all_reduce(sums)
    return [(sums[i] / sums[i + 1]).item() for i in (0, 2, 4)]


def main(epochs=4, batch=48):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29624")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)

    train, test = records(1200, seed=1), records(400, seed=2)
    worn = train.tensors[1]
    weights = torch.where(worn > 0, 0.5 / worn.sum(), 0.5 / (1 - worn).sum())
    sampler = WeightedShareSampler(weights, 480, rank, world, seed=10)
    loader = DataLoader(train, batch_size=batch // world, sampler=sampler)

    torch.manual_seed(2)
    model = DDP(Listener())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, labels in loader:
            loss = F.binary_cross_entropy_with_logits(model(x), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        value, found, false = evaluate(model.module, test, rank, world)
        if rank == 0:
            mean = total.item() / world / len(loader)
            print(f"epoch {epoch}: train {mean:.4f} test {value:.4f} found {found:.3f} false alarms {false:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
