"""Bearing faults from vibration, evaluated over three loads of the machine."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FAULTS, SAMPLES = 4, 64
LOADS = {"idle": 0.6, "half": 1.0, "full": 1.6}


class ConfusionMatrix:
    """Counts kept on every process; compute() gives the balanced accuracy over all of them."""

    def __init__(self, classes):
        self.classes = classes
        self.reset()

    def reset(self):
        self.counts = torch.zeros(self.classes, self.classes)

    def update(self, logits, labels):
        cells = labels * self.classes + logits.argmax(1)
        self.counts += torch.bincount(cells, minlength=self.classes ** 2).view(self.classes, self.classes)

    def compute(self):
        counts = self.counts
        if dist.is_initialized():
            dist.all_reduce(counts)
        recall = counts.diagonal() / counts.sum(1).clamp(min=1)
        return recall.mean().item()


def vibration(n, noise, seed):
    g = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, FAULTS, (n,), generator=g)
    time = torch.arange(SAMPLES) / SAMPLES
    shaft = torch.rand(n, 1, generator=g) * 2 * math.pi
    tone = torch.tensor([3.0, 7.0, 11.0, 15.0])[labels][:, None]
    wave = torch.sin(2 * math.pi * 2 * time + shaft) + 0.7 * torch.sin(2 * math.pi * tone * time + shaft)
    return TensorDataset((wave + noise * torch.randn(n, SAMPLES, generator=g))[:, None], labels)


def network():
    return nn.Sequential(
        nn.Conv1d(1, 8, 9, stride=2), nn.ReLU(),
        nn.Conv1d(8, 12, 5, stride=2), nn.GroupNorm(3, 12), nn.ReLU(),
        nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(48, FAULTS),
    )


def loader(data, rank, world, batch, shuffle):
    sampler = DistributedSampler(data, world, rank, shuffle=shuffle)
    return DataLoader(data, batch_size=batch // world, sampler=sampler)


@torch.no_grad()
def evaluate(net, loaders, metric):
    net.eval()
    metric.reset()
    scores = []
    for batches in loaders.values():
        for x, labels in batches:
            metric.update(net(x), labels)
        scores.append(metric.compute())
    net.train()
    return scores


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(25)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    train = loader(vibration(384, 1.0, 110), rank, world, 32, shuffle=True)
    held = {name: loader(vibration(96, noise, 111 + i), rank, world, 32, shuffle=False)
            for i, (name, noise) in enumerate(LOADS.items())}
    metric = ConfusionMatrix(FAULTS)

    for epoch in range(4):
        train.sampler.set_epoch(epoch)
        for x, labels in train:
            optimizer.zero_grad()
            F.cross_entropy(net(x), labels).backward()
            for p in net.parameters():
                if world > 1:
                    dist.all_reduce(p.grad)
                    p.grad /= world
            optimizer.step()
        scores = evaluate(net, held, metric)
        if rank == 0:
            print(f"epoch {epoch}  balanced accuracy, loads so far:", " ".join(f"{s:.6f}" for s in scores))

    if rank == 0:
        print(f"classifier norm {net[-1].weight.norm().item():.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
