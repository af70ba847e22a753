"""A denoising diffusion model of stars in a spiral galaxy, preconditioned and weighted as in EDM.

Noise levels and noise belong to (epoch, star). An exponential average of the weights, with a half-life given in stars
seen, is what is kept in the end. `python` or `torchrun`.
"""
import argparse
import copy
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

SIGMA_DATA = 0.5


class Galaxy(Dataset):
    """Stars on two arms; an item is a star with its noise level and its noise in this epoch."""

    def __init__(self, count, seed):
        g = torch.Generator().manual_seed(seed)
        radius = torch.rand(count, generator=g).sqrt()
        arm = torch.randint(2, (count,), generator=g)
        angle = 4 * radius + torch.pi * arm + 0.15 * torch.randn(count, generator=g)
        self.stars = torch.stack([radius * angle.cos(), radius * angle.sin()], 1)
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.stars)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(self.seed * 10**9 + self.epoch * 10**5 + i)
        sigma = torch.exp(-1.2 + 1.2 * torch.randn(1, generator=g))
        return self.stars[i], sigma, torch.randn(2, generator=g)


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, sigma):
        total = (sigma ** 2 + SIGMA_DATA ** 2).sqrt()
        skip, out = SIGMA_DATA ** 2 / total ** 2, sigma * SIGMA_DATA / total
        return skip * x + out * self.net(torch.cat([x / total, sigma.log() / 4], 1))


def edm_loss(model, stars, sigma, noise):
    weight = (sigma ** 2 + SIGMA_DATA ** 2) / (sigma * SIGMA_DATA) ** 2
    return (weight * (model(stars + sigma * noise, sigma) - stars) ** 2).mean()


@torch.no_grad()
def follow(ema, net, beta):
    for slow, fast in zip(ema.parameters(), net.parameters()):
        slow.lerp_(fast, 1 - beta)


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=64, help="stars in a step, over all processes")
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--ema-half-life", type=float, default=500, help="in stars")
    return p.parse_args()


def main():
    args = parse()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29621")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)

    data, test = Galaxy(640, seed=1), Galaxy(256, seed=2)
    held_out = [torch.stack(column) for column in zip(*(test[i] for i in range(len(test))))]
    batch_size = args.batch // world
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=5)
    loader = DataLoader(data, batch_size=batch_size, sampler=sampler)

    torch.manual_seed(0)
    model = DDP(Denoiser())
    ema = copy.deepcopy(model.module).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        data.set_epoch(epoch)
        total = torch.zeros(())
        for stars, sigma, noise in loader:
            loss = edm_loss(model, stars, sigma, noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            follow(ema, model.module, beta=0.5 ** (args.batch / args.ema_half_life))
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            kept = edm_loss(ema, *held_out).item()
            print(f"epoch {epoch} train {total.item() / world / len(loader):.4f} average on held-out stars {kept:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
