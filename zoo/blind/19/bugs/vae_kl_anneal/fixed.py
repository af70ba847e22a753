"""Variational autoencoder for stellar spectra with an annealed KL weight."""
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

GLOBAL_BATCH = 24
EPOCHS = 5
LATENT = 3
BINS = 48


class Spectra(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        grid = torch.linspace(0, 1, BINS)
        temperature = torch.rand(n, 1, generator=g)
        centre = 0.2 + 0.6 * torch.rand(n, 1, generator=g)
        depth = 0.5 * torch.rand(n, 1, generator=g)
        continuum = torch.exp(-temperature * grid * 2)
        line = depth * torch.exp(-((grid - centre) / 0.03).square())
        self.flux = continuum - line + 0.01 * torch.randn(n, BINS, generator=g)

    def __len__(self):
        return len(self.flux)

    def __getitem__(self, i):
        return self.flux[i]


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(BINS, 32), nn.SiLU(), nn.Linear(32, 2 * LATENT))
        self.decoder = nn.Sequential(nn.Linear(LATENT, 32), nn.SiLU(), nn.Linear(32, BINS))

    def forward(self, x, eps):
        mu, logvar = self.encoder(x).chunk(2, dim=1)
        z = mu + eps * torch.exp(0.5 * logvar)
        return self.decoder(z), mu, logvar


def kl_weight(step, total_steps):
    """Cosine ramp over the first 60 % of the training."""
    t = min(1.0, step / (0.6 * total_steps))
    return 0.5 * (1 - math.cos(math.pi * t))


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    dataset = Spectra(240, seed=8)
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True, seed=4)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // world, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    model = VAE()
    net = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    total_steps = EPOCHS * len(loader)

    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for x in loader:
            noise = torch.Generator().manual_seed(10_000 + step)
            eps = torch.randn(GLOBAL_BATCH, LATENT, generator=noise)[rank::world]
            recon, mu, logvar = net(x, eps)
            fit = (recon - x).square().sum(1).mean() / 0.02
            kl = -0.5 * (1 + logvar - mu.square() - logvar.exp()).sum(1).mean()
            loss = fit + kl_weight(step, total_steps) * kl
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            sums += torch.stack([fit.detach(), kl.detach()])
            step += 1
        if world > 1:
            dist.all_reduce(sums)
        fit, kl = (sums / (len(loader) * world)).tolist()
        if rank == 0:
            print(f"epoch {epoch} fit {fit:.8f} kl {kl:.8f}")

    if rank == 0:
        norm = sum(p.detach().square().sum() for p in model.parameters())
        print(f"weight norm {norm.item():.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
