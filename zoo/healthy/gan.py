"""A generative adversarial network on a ring of Gaussians: two models, two optimizers."""

import math

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LATENT = 4


def ring(n=256):
    g = torch.Generator().manual_seed(1)
    angle = torch.randint(0, 8, (n,), generator=g) * math.pi / 4
    return TensorDataset(torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(n, 2, generator=g))


def mlp(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 32), nn.LeakyReLU(0.2), nn.Linear(32, outputs))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    generator, critic = DDP(mlp(LATENT, 2)), DDP(mlp(2, 1))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    c_optimizer = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.999))
    dataset = ring()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            fake = generator(torch.randn(len(real), LATENT))

            c_optimizer.zero_grad()
            scores = critic(torch.cat([real, fake.detach()]))
            wanted = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)])
            c_loss = F.binary_cross_entropy_with_logits(scores, wanted)
            c_loss.backward()
            c_optimizer.step()

            g_optimizer.zero_grad()
            g_loss = F.binary_cross_entropy_with_logits(critic(fake), torch.ones(len(fake), 1))
            g_loss.backward()
            g_optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: critic {c_loss.item():.4f}, generator {g_loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
