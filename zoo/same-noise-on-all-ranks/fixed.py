"""A tiny denoising diffusion model of a two-dimensional spiral."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

STEPS = 50


class Denoiser(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2)
        )

    def forward(self, x, t):
        angle = t.float() / STEPS * math.pi
        return self.net(torch.cat([x, torch.stack([angle.sin(), angle.cos()], 1)], 1))


def spiral(n=256):
    t = torch.linspace(0.5, 3 * math.pi, n)
    return TensorDataset(torch.stack([t * t.cos(), t * t.sin()], 1) / 5)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.1, STEPS), 0)
    dataset = spiral()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = DDP(Denoiser())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    draws = torch.Generator().manual_seed(2024 + rank)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for (x,) in loader:
            t = torch.randint(0, STEPS, (len(x),), generator=draws)
            noise = torch.randn(x.shape, generator=draws)
            a = alphas[t].unsqueeze(1)
            loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
