"""Deep SVDD on vibration features of pumps: find pumps that are about to fail.

The net maps healthy records close to a centre, which is fixed before the training as the mean
of the untrained net's outputs; the distance from it is the score of a record.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

FEATURES, OUT, BATCH, EPOCHS = 16, 6, 24, 6


def healthy(n, seed):
    """Pumps of four makes, each with its own usual spectrum; a few makes are rare."""
    g = torch.Generator().manual_seed(seed)
    usual = 1.5 * torch.randn(4, FEATURES, generator=torch.Generator().manual_seed(50))
    make = torch.multinomial(torch.tensor([0.5, 0.3, 0.15, 0.05]), n, replacement=True, generator=g)
    load = torch.rand(n, 1, generator=g)
    return usual[make] * (0.6 + load) + 0.3 * torch.randn(n, FEATURES, generator=g)


def failing(n, seed):
    g = torch.Generator().manual_seed(seed + 1)
    extra = torch.zeros(n, FEATURES).scatter_(1, torch.randint(FEATURES, (n, 2), generator=g), 2.0)
    return healthy(n, seed) + extra


class SVDD(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        # no biases and an unbounded activation, or the net could map everything to the centre
        self.body = nn.Sequential(
            nn.Linear(FEATURES, width, bias=False), nn.LeakyReLU(0.1),
            nn.Linear(width, width, bias=False), nn.LeakyReLU(0.1),
            nn.Linear(width, OUT, bias=False))
        self.register_buffer("centre", torch.zeros(OUT))

    def forward(self, x):
        return (self.body(x) - self.centre).square().sum(1)

    @torch.no_grad()
    def set_centre(self, loader, margin=0.1):
        total, count = torch.zeros(OUT), torch.zeros(1)
        for (x,) in loader:
            total += self.body(x).sum(0)
            count += len(x)
        centre = total / count
        near = centre.abs() < margin
        self.centre.copy_(torch.where(near, margin * torch.sign(centre), centre))


@torch.no_grad()
def auc(model, good, bad):
    a, b = model(good), model(bad)
    return (b[:, None] > a[None]).double().mean().item()


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29626")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)

    train = TensorDataset(healthy(192, seed=1))
    sampler = DistributedSampler(train, shuffle=True, seed=6)
    loader = DataLoader(train, batch_size=BATCH // world, sampler=sampler)

    torch.manual_seed(8)
    model = SVDD()
    net = DDP(model)
    model.set_centre(loader)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        distance = torch.zeros(1)
        for (x,) in loader:
            loss = net(x).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            distance += loss.detach() / len(loader)
        dist.all_reduce(distance)
        score = auc(model, healthy(150, seed=2), failing(150, seed=3))
        if rank == 0:
            print(f"epoch {epoch} distance {distance.item() / world:.6f} auc {score:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
