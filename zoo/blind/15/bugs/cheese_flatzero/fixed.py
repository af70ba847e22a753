"""Ripeness of cheese from near-infrared spectra, with AdamW's moments spread over the processes.

All parameters live in one flat vector, padded so that it can be cut into equal parts. A process
keeps the moments of its own part only, updates it and collects the other parts.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BANDS, BATCH, EPOCHS = 40, 32, 5


def spectra(n, seed):
    g = torch.Generator().manual_seed(seed)
    bands = torch.linspace(0, 1, BANDS)
    centre = torch.tensor([0.2, 0.5, 0.75])
    amount = torch.rand(n, 3, generator=g)
    peaks = torch.exp(-((bands - centre[:, None]) / 0.08) ** 2)
    curves = amount @ peaks + 0.1 * torch.randn(n, BANDS, generator=g) + torch.randn(n, 1, generator=g) * bands * 0.2
    ripe = amount[:, 0] * 1.5 - amount[:, 1] * amount[:, 2] + 0.5
    return TensorDataset(curves, ripe[:, None])


class FlatAdamW:
    def __init__(self, params, lr, weight_decay, betas=(0.9, 0.99), eps=1e-8):
        self.params = list(params)
        self.lr, self.betas, self.eps, self.steps = lr, betas, eps, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.size = sum(p.numel() for p in self.params)
        self.part = -(-self.size // self.world)
        padded = self.part * self.world
        self.weights, self.grads = torch.zeros(padded), torch.zeros(padded)
        decay = torch.zeros(padded)
        at = 0
        for p in self.params:
            piece = slice(at, at + p.numel())
            self.weights[piece] = p.data.flatten()
            p.data = self.weights[piece].view_as(p)
            p.grad = self.grads[piece].view_as(p)
            if p.ndim > 1:                                   # biases and norms do not decay
                decay[piece] = weight_decay
            at += p.numel()
        dist.broadcast(self.weights, src=0)
        self.own = slice(self.rank * self.part, (self.rank + 1) * self.part)
        self.decay = decay[self.own]
        self.first, self.second = torch.zeros(self.part), torch.zeros(self.part)

    def zero_grad(self):
        self.grads.zero_()

    @torch.no_grad()
    def step(self):
        dist.all_reduce(self.grads)
        grad = self.grads[self.own] / self.world
        self.steps += 1
        b1, b2 = self.betas
        self.first.lerp_(grad, 1 - b1)
        self.second.lerp_(grad.square(), 1 - b2)
        update = self.first / (1 - b1 ** self.steps)
        update /= (self.second / (1 - b2 ** self.steps)).sqrt() + self.eps
        weights = self.weights[self.own]
        weights -= self.lr * (update + self.decay * weights)
        dist.all_gather(list(self.weights.split(self.part)), weights.clone())


def build():
    torch.manual_seed(6)
    return nn.Sequential(nn.Linear(BANDS, 32), nn.LayerNorm(32), nn.Tanh(),
                         nn.Linear(32, 24), nn.LayerNorm(24), nn.Tanh(), nn.Linear(24, 1))


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29619")
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.set_default_dtype(torch.float64)

    train, test = spectra(256, seed=1), spectra(128, seed=2)
    sampler = DistributedSampler(train, seed=3)
    loader = DataLoader(train, batch_size=BATCH // world, sampler=sampler)
    model = build()
    optimizer = FlatAdamW(model.parameters(), lr=6e-3, weight_decay=0.5)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        squares = torch.zeros(())
        for curves, ripe in loader:
            optimizer.zero_grad()
            loss = (model(curves) - ripe).square().mean()
            loss.backward()
            optimizer.step()
            squares += loss.detach() / len(loader)
        dist.all_reduce(squares)
        with torch.no_grad():
            curves, ripe = test.tensors
            error = (model(curves) - ripe).square().mean()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} train {squares / world:.6f} test {error:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
