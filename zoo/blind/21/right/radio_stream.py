"""Modulation classifier on a stream of short signals, with batch statistics over all ranks."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

BATCH, LENGTH, CLASSES = 24, 64, 4


class Signals(IterableDataset):
    def __init__(self, first, count, rank, world):
        self.first, self.count, self.rank, self.world = first, count, rank, world

    def signal(self, i):
        g = torch.Generator().manual_seed(i)
        label = int(torch.randint(0, CLASSES, (1,), generator=g))
        t = torch.arange(LENGTH, dtype=torch.get_default_dtype()) / LENGTH
        f = 4 + 3 * torch.rand((), generator=g)
        phase = 6.28 * torch.rand((), generator=g)
        amp = 1 + 0.8 * torch.sin(9 * t) * (label % 2)
        chirp = 6 * t * t * (label // 2)
        wave = amp * torch.sin(6.28 * (f * t + chirp) + phase)
        return (wave + 0.3 * torch.randn(LENGTH, generator=g))[None], label

    def __iter__(self):
        for i in range(self.count):
            if i % self.world == self.rank:
                yield self.signal(self.first + i)


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        t = t.clone()
        dist.all_reduce(t)
        return t

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class GlobalNorm1d(nn.Module):
    def __init__(self, channels, momentum=0.1, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.ones(channels))
        self.momentum, self.eps = momentum, eps

    def total(self, t):
        return SumOverRanks.apply(t) if dist.is_initialized() else t

    def forward(self, x):
        if self.training:
            count = self.total(torch.tensor(x.numel() / x.shape[1]))
            mean = self.total(x.sum((0, 2))) / count
            var = self.total((x - mean[:, None]).square().sum((0, 2))) / count
            with torch.no_grad():
                self.mean.lerp_(mean, self.momentum)
                self.var.lerp_(var * count / (count - 1), self.momentum)
        else:
            mean, var = self.mean, self.var
        scale = self.weight / (var + self.eps).sqrt()
        return (x - mean[:, None]) * scale[:, None] + self.bias[:, None]


def network():
    return nn.Sequential(
        nn.Conv1d(1, 12, 7, stride=2, bias=False), GlobalNorm1d(12), nn.ReLU(),
        nn.Conv1d(12, 24, 5, stride=2, bias=False), GlobalNorm1d(24), nn.ReLU(),
        nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(24, CLASSES))


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(17)
    net = network()
    model = DDP(net, forward_sync_buffers=False) if dist.is_initialized() else net
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    count = 7 * BATCH + 10
    loader = DataLoader(Signals(0, count, rank, world), batch_size=BATCH // world)
    check = DataLoader(Signals(10_000, 150, rank, world), batch_size=32)

    for epoch in range(2):
        net.train()
        seen = 0
        shown = torch.zeros(())
        for x, label in loader:
            rows = min(BATCH, count - seen)
            seen += rows
            loss = F.cross_entropy(model(x), label, reduction="sum")
            opt.zero_grad()
            (loss * world / rows).backward()
            opt.step()
            shown += loss.detach()
        net.eval()
        score = torch.zeros(2)
        with torch.no_grad():
            for x, label in check:
                score += torch.tensor([(net(x).argmax(1) == label).sum(), len(label)])
        if dist.is_initialized():
            dist.all_reduce(shown)
            dist.all_reduce(score)
        if rank == 0:
            print(f"pass {epoch} loss {shown / count:.5f} accuracy {score[0] / score[1]:.4f} of {int(score[1])}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
