"""ZeRO-1 by hand on one flat vector: a convolutional denoising autoencoder for digit pictures.

All weights are views into one flat tensor, padded so that it can be cut into equal pieces; every process holds AdamW's
state for its piece only, whatever tensors the piece's borders run through.
"""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, MICRO, EPOCHS, TRAIN = 96, 2, 3, 1344


class FlatAdamW:
    def __init__(self, module, lr, decay, clip, betas=(0.9, 0.95), eps=1e-6):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.params = list(module.parameters())
        n = sum(p.numel() for p in self.params)
        self.piece = math.ceil(n / self.world)
        self.flat = torch.zeros(self.piece * self.world)
        self.grad = torch.zeros_like(self.flat)
        decays, at = torch.zeros_like(self.flat), 0
        for p in self.params:
            end = at + p.numel()
            self.flat[at:end] = p.detach().flatten()
            p.data, p.grad = self.flat[at:end].view_as(p), self.grad[at:end].view_as(p)
            decays[at:end] = decay * (p.ndim > 1)
            at = end
        dist.broadcast(self.flat, 0)
        mine = slice(self.rank * self.piece, (self.rank + 1) * self.piece)
        self.mine, self.decay = self.flat[mine], decays[mine]
        self.m, self.v, self.t = torch.zeros(self.piece), torch.zeros(self.piece), 0
        self.lr, self.clip, self.betas, self.eps = lr, clip, betas, eps

    @torch.no_grad()
    def step(self):
        g = torch.empty(self.piece)
        dist.reduce_scatter_tensor(g, self.grad)
        g /= self.world
        square = g.square().sum()
        dist.all_reduce(square)                                       # of all pieces; the padding is zero
        norm = square.sqrt().item()
        g *= min(1.0, self.clip / (norm + 1e-6))
        self.t += 1
        b1, b2 = self.betas
        self.m.lerp_(g, 1 - b1)
        self.v.lerp_(g * g, 1 - b2)
        update = (self.m / (1 - b1 ** self.t)) / ((self.v / (1 - b2 ** self.t)).sqrt() + self.eps)
        self.mine -= self.lr * (update + self.decay * self.mine)
        dist.all_gather_into_tensor(self.flat, self.mine.clone())
        self.grad.zero_()
        return norm


class Denoiser(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(1, 8, 3, 2, 1), nn.Conv2d(8, 12, 3, 2, 1)
        self.code = nn.Linear(48, 15)
        self.back = nn.Linear(15, 48)
        self.up1, self.up2 = nn.ConvTranspose2d(12, 8, 4, 2, 1), nn.ConvTranspose2d(8, 1, 4, 2, 1)

    def forward(self, x):
        x = F.silu(self.down2(F.silu(self.down1(x))))
        x = F.silu(self.back(self.code(x.flatten(1)))).view(-1, 12, 2, 2)
        return self.up2(F.silu(self.up1(x)))


def main():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29623")
    dist.init_process_group("gloo", rank=int(os.environ.get("RANK", 0)), world_size=int(os.environ.get("WORLD_SIZE", 1)))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank * 31 + 7)
    images = torch.tensor(load_digits().images / 16, dtype=torch.float32)[:, None]
    noise = 0.3 * torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    train = TensorDataset(images[:TRAIN], (images + noise)[:TRAIN])
    clean, noisy = images[TRAIN:], (images + noise)[TRAIN:]
    sampler = DistributedSampler(train, seed=19)
    loader = DataLoader(train, BATCH // MICRO // world, sampler=sampler)

    model = Denoiser()
    optimizer = FlatAdamW(model, lr=6e-3, decay=0.01, clip=0.5)
    steps, done = EPOCHS * TRAIN // BATCH, 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        meter = torch.zeros(())
        for i, (target, x) in enumerate(loader, 1):
            loss = F.mse_loss(model(x), target)
            (loss / MICRO).backward()                                 # adds to the flat gradient
            meter += loss.detach()
            if i % MICRO == 0:
                optimizer.lr = 6e-3 * (1 - done / steps)
                norm = optimizer.step()
                done += 1
        with torch.no_grad():
            error = (model(noisy[rank::world]) - clean[rank::world]).square().sum()
        report = torch.stack([meter / len(loader) / world, error / clean.numel()])
        dist.all_reduce(report)
        if rank == 0:
            print(f"epoch {epoch} train {report[0]:.5f} test {report[1]:.5f} norm {norm:.4f} steps {done}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
