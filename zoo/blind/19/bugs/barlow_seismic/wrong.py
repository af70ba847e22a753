"""Self-supervised pretraining of a seismogram encoder with a redundancy-reduction loss."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

GLOBAL_BATCH = 32
EPOCHS = 3
TRACES = 192
LENGTH = 96


def setup():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


def make_traces():
    g = torch.Generator().manual_seed(11)
    t = torch.arange(LENGTH)
    onset = torch.randint(10, 50, (TRACES, 1), generator=g)
    freq = 0.1 + 0.4 * torch.rand(TRACES, 1, generator=g)
    decay = 0.03 + 0.1 * torch.rand(TRACES, 1, generator=g)
    lag = (t - onset).clamp(min=0)
    wave = torch.sin(2 * math.pi * freq * lag) * torch.exp(-decay * lag)
    return wave + 0.02 * torch.randn(TRACES, LENGTH, generator=g)


def view(traces, ids, epoch, which):
    out = []
    for i in ids.tolist():
        g = torch.Generator().manual_seed((epoch * TRACES + i) * 2 + which)
        shift = int(torch.randint(-6, 7, (1,), generator=g))
        gain = 0.7 + 0.6 * torch.rand(1, generator=g)
        noise = 0.05 * torch.randn(LENGTH, generator=g)
        out.append(gain * traces[i].roll(shift) + noise)
    return torch.stack(out).unsqueeze(1)


class GlobalSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Encoder(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(1, 8, 9, stride=3), nn.GELU(),
            nn.Conv1d(8, 16, 5, stride=2), nn.GELU(),
        )
        self.head = nn.Linear(16, dim)

    def forward(self, x):
        z = self.head(self.body(x).mean(2))
        return F.normalize(z, dim=1) * math.sqrt(z.shape[1])


def redundancy_loss(za, zb, weight=0.02):
    c = za.T @ zb / GLOBAL_BATCH
    c = GlobalSum.apply(c)
    diagonal = c.diagonal()
    invariance = (diagonal - 1).square().sum()
    redundancy = c.square().sum() - diagonal.square().sum()
    return invariance + weight * redundancy


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = setup()
    traces = make_traces()
    torch.manual_seed(0)
    model = DDP(Encoder())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)

    for epoch in range(EPOCHS):
        order = torch.randperm(TRACES, generator=torch.Generator().manual_seed(100 + epoch))
        running = 0.0
        for batch in order.split(GLOBAL_BATCH):
            ids = batch[rank::world]
            both = torch.cat([view(traces, ids, epoch, 0), view(traces, ids, epoch, 1)])
            za, zb = model(both).chunk(2)
            loss = redundancy_loss(za, zb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            running += loss.item()
        if rank == 0:
            print(f"epoch {epoch} loss {running / (TRACES // GLOBAL_BATCH):.8f}")

    if rank == 0:
        norm = sum(p.detach().square().sum() for p in model.parameters()).sqrt()
        print(f"weight norm {norm.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
