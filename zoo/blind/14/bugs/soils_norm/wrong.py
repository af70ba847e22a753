"""Organic carbon of soil samples from reflectances, with batch normalisation over all processes on the CPU.

torch's SyncBatchNorm is for accelerators only, so the statistics are summed with a differentiable all-reduce here.
Running statistics are used for the test rows, as usual.
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_default_dtype(torch.float64)
BANDS = 16
BATCH, EPOCHS = 24, 6


class SumOverProcesses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class BatchNorm(nn.Module):
    """Normalises by the mean and variance of the batch over all processes."""

    def __init__(self, width, momentum=0.2, eps=1e-5):
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("running_mean", torch.zeros(width))
        self.register_buffer("running_var", torch.ones(width))

    def forward(self, x):
        if not self.training:
            mean, var = self.running_mean, self.running_var
        else:
            rows = torch.full((1,), float(len(x)))
            sums = SumOverProcesses.apply(torch.cat([x.sum(0), x.square().sum(0), rows]))
            total, squares, n = sums.split([x.shape[1], x.shape[1], 1])
            mean = total / n
            var = squares / n - mean.square()
            with torch.no_grad():
                self.running_mean.lerp_(x.mean(0), self.momentum)
                self.running_var.lerp_(x.var(0), self.momentum)
        return (x - mean) * torch.rsqrt(var + self.eps) * self.weight + self.bias


def soils(count, seed):
    shared = torch.Generator().manual_seed(70)
    curve = torch.randn(3, BANDS, generator=shared)
    g = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 3, generator=g)
    x = 0.4 + 0.3 * torch.sigmoid(hidden @ curve) + 0.02 * torch.randn(count, BANDS, generator=g)
    y = 2 + hidden[:, 0] - 0.5 * hidden[:, 1] * hidden[:, 2]
    return TensorDataset(x, y[:, None])


def make_net():
    return nn.Sequential(
        nn.Linear(BANDS, 32, bias=False), BatchNorm(32), nn.ReLU(),
        nn.Linear(32, 32, bias=False), BatchNorm(32), nn.ReLU(),
        nn.Linear(32, 1))


def main():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29626")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)

    train, test = soils(192, seed=1), soils(96, seed=2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=8)
    loader = DataLoader(train, batch_size=BATCH // world, sampler=sampler)
    torch.manual_seed(6)
    model = DDP(make_net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(())
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            model.eval()
            with torch.no_grad():
                x, y = test[:]
                value = F.mse_loss(model.module(x), y).item()
            print(f"epoch {epoch} train {total.item() / world / len(loader):.5f} test {value:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
