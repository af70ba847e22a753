"""Peat humification class from reflectance spectra, in bfloat16 with float32 masters.

The net computes in bfloat16. Gradients of the micro-batches are added up in float32, and
the optimizer works on float32 masters of which each process looks after a share.
"""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

CLASSES = 5
CHANNELS = 40
BATCH, MICRO = 32, 8
STEPS = 40


def spectra(count, seed):
    rng = np.random.default_rng(seed)
    grade = rng.integers(CLASSES, size=count)
    band = np.linspace(0, 1, CHANNELS)[None]
    depth = (0.2 + 0.15 * grade)[:, None] + 0.05 * rng.normal(size=(count, 1))
    tilt = rng.normal(size=(count, 1))
    x = tilt * band - 4 * depth * np.exp(-((band - 0.55) / 0.12) ** 2) + 0.2 * rng.normal(size=(count, CHANNELS))
    return torch.tensor(x, dtype=torch.float32), torch.from_numpy(grade)


class PeatNet(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(CHANNELS, width), nn.Tanh(),
            nn.Linear(width, width), nn.Tanh(),
            nn.Linear(width, CLASSES))

    def forward(self, x):
        return self.layers(x.to(self.layers[0].weight.dtype)).float()


class MixedTrainer:
    def __init__(self, rank, world, lr):
        self.rank, self.world = rank, world
        torch.manual_seed(55)
        self.net = PeatNet()
        self.masters = [p.detach().clone() for p in self.net.parameters()]
        self.net.to(torch.bfloat16)
        self.params = list(self.net.parameters())
        self.sums = [torch.zeros_like(m) for m in self.masters]
        self.owners = [i % world for i in range(len(self.masters))]
        mine = [m for m, owner in zip(self.masters, self.owners) if owner == rank]
        self.optimizer = torch.optim.AdamW(mine, lr=lr, eps=1e-6, weight_decay=0.01)

    def backward(self, x, y):
        """One micro-batch; its gradient goes to the float32 sums."""
        loss = F.cross_entropy(self.net(x), y) * len(y) / BATCH
        loss.backward()
        for p, total in zip(self.params, self.sums):
            total += p.grad.float()
            p.grad = None
        return loss.detach()

    @torch.no_grad()
    def update(self):
        for master, total in zip(self.masters, self.sums):
            dist.all_reduce(total)
            master.grad = total
        self.optimizer.step()
        for p, master in zip(self.params, self.masters):
            p.copy_(master)
        for owner, master in zip(self.owners, self.masters):
            dist.broadcast(master, src=owner)
        for total in self.sums:
            total.zero_()

    def step(self, x, y):
        """x, y: the rows of the whole step."""
        loss = torch.zeros(())
        parts = list(zip(x.split(MICRO), y.split(MICRO)))
        for bx, by in parts[self.rank::self.world]:
            loss += self.backward(bx, by)
        self.update()
        dist.all_reduce(loss)
        return loss.item()

    def test(self, x, y):
        with torch.no_grad():
            logits = self.net(x)
        return F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    trainer = MixedTrainer(dist.get_rank(), dist.get_world_size(), lr=4e-3)
    x, y = spectra(BATCH * STEPS, seed=20)
    for step, (bx, by) in enumerate(zip(x.split(BATCH), y.split(BATCH)), start=1):
        loss = trainer.step(bx, by)
        if trainer.rank == 0 and (step == 1 or step % 8 == 0):
            print(f"{step:3d}: loss {loss:.4f}", flush=True)
    if trainer.rank == 0:
        loss, right = trainer.test(*spectra(600, seed=21))
        print(f"test: loss {loss:.4f}, accuracy {right:.3f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
