"""Compressing textures of marble with a vector quantised autoencoder whose codebook follows running averages."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_default_dtype(torch.float64)
SIZE, CODES, DIM = 8, 16, 6


def over_all(x):
    if dist.is_initialized():
        dist.all_reduce(x)
    return x


class Codebook(nn.Module):
    def __init__(self, decay=0.9):
        super().__init__()
        self.decay = decay
        codes = torch.randn(CODES, DIM)
        self.register_buffer("codes", codes)
        self.register_buffer("counts", torch.ones(CODES))
        self.register_buffer("sums", codes.clone())

    def forward(self, z):
        flat = z.permute(0, 2, 3, 1).reshape(-1, DIM)
        nearest = torch.cdist(flat, self.codes).argmin(1)
        found = self.codes[nearest].view(z.size(0), z.size(2), z.size(3), DIM).permute(0, 3, 1, 2)
        if self.training:
            self.follow(flat.detach(), nearest)
        commit = F.mse_loss(z, found)
        return z + (found - z).detach(), commit

    @torch.no_grad()
    def follow(self, flat, nearest):
        member = F.one_hot(nearest, CODES).to(flat.dtype)
        stats = torch.cat([member.sum(0)[:, None], member.T @ flat], 1)
        self.counts.mul_(self.decay).add_(stats[:, 0], alpha=1 - self.decay)
        self.sums.mul_(self.decay).add_(stats[:, 1:], alpha=1 - self.decay)
        self.codes.copy_(self.sums / self.counts.clamp(min=1e-3)[:, None])


class MarbleVQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 12, 4, 2, 1), nn.ReLU(), nn.Conv2d(12, DIM, 3, 1, 1))
        self.book = Codebook()
        self.decoder = nn.Sequential(nn.Conv2d(DIM, 12, 3, 1, 1), nn.ReLU(), nn.ConvTranspose2d(12, 1, 4, 2, 1))

    def forward(self, image):
        code, commit = self.book(self.encoder(image))
        return self.decoder(code), commit


def textures(n, seed):
    g = torch.Generator().manual_seed(seed)
    grid = torch.linspace(0, 3, SIZE)
    angle, phase = torch.rand(2, n, 1, 1, generator=g) * 6.28
    wave = torch.cos(angle) * grid[None, :, None] + torch.sin(angle) * grid[None, None, :]
    image = torch.sin(2 * wave + phase) + 0.1 * torch.randn(n, SIZE, SIZE, generator=g)
    return image[:, None]


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(19)
    net = MarbleVQ()
    model = DDP(net) if world > 1 else net
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    images = textures(512, 1)
    g = torch.Generator().manual_seed(2)
    for epoch in range(4):
        model.train()
        report = torch.zeros(2)
        batches = torch.randperm(len(images), generator=g).split(32)
        for batch in batches:
            image = images[batch[rank::world]]
            out, commit = model(image)
            error = F.mse_loss(out, image)
            opt.zero_grad()
            (error + 0.25 * commit).backward()
            opt.step()
            report += torch.stack([error, commit]).detach() / len(batches) / world
        report = over_all(report)
        if rank == 0:
            print(f"epoch {epoch} error {report[0]:.8f} commitment {report[1]:.8f}")
    net.eval()
    if rank == 0:
        fresh = textures(128, 3)
        with torch.no_grad():
            out, commit = net(fresh)
        print(f"fresh error {F.mse_loss(out, fresh):.8f} codes {net.book.codes.norm():.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
