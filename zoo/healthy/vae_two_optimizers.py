"""A variational autoencoder with a density critic, one optimizer each."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Noisy(Dataset):
    """Every sample brings its own noise for the latent code."""

    def __init__(self, n=80):
        g = torch.Generator().manual_seed(3)
        self.x = torch.randn(n, 3, generator=g) @ torch.randn(3, 10, generator=g)
        self.epoch = 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(10_000 * self.epoch + i)
        return self.x[i], torch.randn(4, generator=g)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 8)), nn.Linear(4, 10)

    def forward(self, x, noise):
        mu, logvar = self.enc(x).chunk(2, dim=1)
        z = mu + noise * (0.5 * logvar).exp()
        return self.dec(z), mu, logvar, z


def elbo(x, out, mu, logvar, beta):
    kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
    return F.mse_loss(out, x) + beta * kl


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    vae = DDP(VAE())
    critic = DDP(nn.Sequential(nn.Linear(4, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1)))
    opt_vae = torch.optim.Adam(vae.parameters(), lr=3e-3, betas=(0.5, 0.9))
    opt_critic = torch.optim.RMSprop(critic.parameters(), lr=1e-3)
    data = Noisy()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16 // dist.get_world_size(), sampler=sampler, drop_last=True)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        data.epoch = epoch
        beta = min(1.0, 0.25 * epoch)
        for x, noise in loader:
            with torch.no_grad():
                z = vae(x, noise)[3]
            opt_critic.zero_grad()
            scores = critic(torch.cat([noise, z]))
            real, fake = scores.chunk(2)
            (F.softplus(-real).mean() + F.softplus(fake).mean()).backward()
            opt_critic.step()

            opt_vae.zero_grad()
            out, mu, logvar, z = vae(x, noise)
            critic.requires_grad_(False)
            loss = elbo(x, out, mu, logvar, beta) + 0.1 * F.softplus(-critic.module(z)).mean()
            loss.backward()
            critic.requires_grad_(True)
            opt_vae.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
