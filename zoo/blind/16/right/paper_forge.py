"""DCGAN-style training on 8x8 digits with data parallel G and D and an averaged generator."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel

nz, nc, batch_size, num_epochs = 16, 10, 80, 3


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.label = nn.Embedding(nc, nz)
        self.main = nn.Sequential(
            nn.ConvTranspose2d(2 * nz, 24, 4, bias=False), nn.GroupNorm(4, 24), nn.ReLU(),
            nn.ConvTranspose2d(24, 1, 4, stride=2, padding=1), nn.Sigmoid())

    def forward(self, z, label):
        return self.main(torch.cat([z, self.label(label)], 1)[:, :, None, None])


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.LeakyReLU(0.2),
                                  nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.LeakyReLU(0.2), nn.Flatten())
        self.score, self.label = nn.Linear(128, 1), nn.Embedding(nc, 128)

    def forward(self, image, label):
        h = self.body(image)
        return self.score(h).squeeze(1) + (h * self.label(label)).sum(1)


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.05)


def main():
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if world_size > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world_size)
    torch.manual_seed(7)

    digits = load_digits()
    images = torch.tensor(digits.images[:1760]).unsqueeze(1) / 16.0
    labels = torch.tensor(digits.target[:1760])

    netG, netD = Generator().double(), Discriminator().double()
    netG.apply(weights_init)
    netD.apply(weights_init)
    ema = copy.deepcopy(netG).requires_grad_(False)
    if world_size > 1:
        netG, netD = DistributedDataParallel(netG), DistributedDataParallel(netD)
    coreG = netG.module if world_size > 1 else netG
    coreD = netD.module if world_size > 1 else netD
    optG = torch.optim.Adam(netG.parameters(), lr=2e-3, betas=(0.5, 0.99))
    optD = torch.optim.Adam(netD.parameters(), lr=1e-3, betas=(0.5, 0.99))
    draw = torch.Generator().manual_seed(1001)
    part = slice(rank * batch_size // world_size, (rank + 1) * batch_size // world_size)

    def latent():
        """Noise and classes of the global batch, of which a process uses its part."""
        z = torch.randn(batch_size, nz, generator=draw, dtype=torch.float64)
        wanted = torch.randint(0, nc, (batch_size,), generator=draw)
        return z[part], wanted[part]

    for epoch in range(num_epochs):
        order = torch.randperm(len(images), generator=draw)
        totals = torch.zeros(3, dtype=torch.float64)
        for batch in order.split(batch_size):
            real, real_label = images[batch[part]], labels[batch[part]]

            z, wanted = latent()
            with torch.no_grad():
                fake = coreG(z, wanted)
            optD.zero_grad()
            both = netD(torch.cat([real, fake]), torch.cat([real_label, wanted]))
            on_real, on_fake = both.chunk(2)
            lossD = F.relu(1 - on_real).mean() + F.relu(1 + on_fake).mean()
            lossD.backward()
            optD.step()

            z, wanted = latent()
            optG.zero_grad()
            lossG = -coreD(netG(z, wanted), wanted).mean()
            lossG.backward()
            optG.step()

            with torch.no_grad():
                for slow, fast in zip(ema.parameters(), coreG.parameters()):
                    slow.lerp_(fast, 0.05)
            totals += torch.tensor([lossD.item(), lossG.item(), 1.0], dtype=torch.float64)

        if world_size > 1:
            dist.all_reduce(totals)
        if rank == 0:
            lossD, lossG = (totals[:2] / totals[2]).tolist()
            g = torch.Generator().manual_seed(0)
            wanted = torch.arange(nc).repeat(8)
            with torch.no_grad():
                shown = ema(torch.randn(len(wanted), nz, generator=g, dtype=torch.float64), wanted)
            gap = torch.stack([(shown[wanted == c].mean(0) - images[labels == c].mean(0)).pow(2).mean()
                               for c in range(nc)]).mean()
            print(f"[{epoch}/{num_epochs}] D {lossD:.8f} G {lossG:.8f} gap of class means {gap:.8f}")

    if world_size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
