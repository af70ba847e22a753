"""A variational autoencoder for grain-size curves of sediments, trained with GECO.

Instead of a fixed weight, the reconstruction error is a constraint (at most TOLERANCE): the
multiplier that weighs it against the divergence grows while the running error is too large
and falls when it is small enough.
"""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SIEVES, LATENT, BATCH, EPOCHS = 24, 4, 32, 6
TOLERANCE, SPEED, MEMORY = 3.0, 0.015, 0.8


class Curves(Dataset):
    """Each sample mixes two log-normal populations of grains, of very unequal widths."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        sieve = torch.linspace(-2, 2, SIEVES)
        centre = torch.randn(n, 2, 1, generator=g)
        width = 0.25 + 0.9 * torch.rand(n, 2, 1, generator=g) ** 3
        share = torch.rand(n, 1, 1, generator=g)
        bumps = torch.exp(-((sieve - centre) / width) ** 2)
        self.curves = (share * bumps[:, :1] + (1 - share) * bumps[:, 1:]).squeeze(1) * 2
        self.curves += 0.03 * torch.randn(n, SIEVES, generator=g)

    def __len__(self):
        return len(self.curves)

    def __getitem__(self, i):
        return i, self.curves[i]


class VAE(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SIEVES, width), nn.Tanh(), nn.Linear(width, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, width), nn.Tanh(), nn.Linear(width, SIEVES))

    def forward(self, x, noise):
        mean, log_var = self.encoder(x).chunk(2, 1)
        rebuilt = self.decoder(mean + noise * torch.exp(0.5 * log_var))
        divergence = 0.5 * (mean ** 2 + log_var.exp() - log_var - 1).sum(1)
        return (rebuilt - x).square().sum(1), divergence


class Multiplier:
    def __init__(self):
        self.log, self.running = 0.0, None

    @property
    def value(self):
        return math.exp(self.log)

    def update(self, error):
        gap = error.detach().mean() - TOLERANCE
        dist.all_reduce(gap)
        gap = gap.item() / dist.get_world_size()
        self.running = gap if self.running is None else MEMORY * self.running + (1 - MEMORY) * gap
        self.log = min(max(self.log + SPEED * self.running, -4.0), 4.0)


def main():
    for key, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29621").items():
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)

    data = Curves(256, seed=1)
    sampler = DistributedSampler(data, seed=2)
    loader = DataLoader(data, batch_size=BATCH // world, sampler=sampler)
    torch.manual_seed(3)
    net = DDP(VAE())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    multiplier = Multiplier()

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        noise = torch.randn(len(data), LATENT, generator=torch.Generator().manual_seed(100 + epoch))
        sums = torch.zeros(2)
        for index, curves in loader:
            error, divergence = net(curves, noise[index])
            loss = (divergence.mean() + multiplier.value * error.mean()) / (1 + multiplier.value)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            multiplier.update(error)
            sums += torch.stack([error.detach().sum(), divergence.detach().sum()])
        dist.all_reduce(sums)
        error, divergence = (sums / len(data)).tolist()
        if rank == 0:
            print(f"epoch {epoch} error {error:.5f} divergence {divergence:.5f} "
                  f"multiplier {multiplier.value:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
