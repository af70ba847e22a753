"""Denoising score model on a ring of small islands in the plane (EDM-like noise levels)."""
import math
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Trainer:
    batch = 64
    steps = 50

    def __init__(self, rank, world, seed=40):
        self.rank, self.world = rank, world
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(3, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))
        self.model = DDP(self.net)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=4e-3, weight_decay=1e-3)
        self.points = self.islands(2048, seed=1)
        self.order = torch.Generator().manual_seed(seed + 1)
        self.noise = torch.Generator().manual_seed(seed + 2)

    @staticmethod
    def islands(n, seed):
        g = torch.Generator().manual_seed(seed)
        k = torch.randint(0, 7, (n,), generator=g)
        angle = 2 * math.pi * k / 7
        centre = torch.stack([angle.cos(), angle.sin()], 1)
        return centre + 0.06 * torch.randn(n, 2, generator=g)

    def denoise(self, net, noisy, sigma):
        c_in = 1 / (sigma ** 2 + 0.25).sqrt()
        return net(torch.cat([noisy * c_in, sigma.log() / 4], dim=1))

    def loss(self, net, clean):
        n = len(clean)
        draw = torch.randn(n * self.world, 3, generator=self.noise)[self.rank::self.world]
        sigma = (draw[:, :1] * 0.9 - 1.0).exp()
        out = self.denoise(net, clean + sigma * draw[:, 1:], sigma)
        weight = 1 / (sigma ** 2 + 0.05)
        return (weight * (out - clean) ** 2).mean()

    def step(self):
        rows = torch.randint(0, len(self.points), (self.batch,), generator=self.order)
        clean = self.points[rows[self.rank::self.world]]
        loss = self.loss(self.model, clean)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()
        return loss.detach()

    def fit(self):
        for i in range(self.steps):
            loss = self.step()
            if i % 10 == 9:
                dist.all_reduce(loss)
                if self.rank == 0:
                    print(f"{i + 1:3d} steps, loss {loss.item() / self.world:.5f}")

    @torch.no_grad()
    def validate(self):
        clean = self.islands(512, seed=3)
        g = torch.Generator().manual_seed(4)
        eps = torch.randn(512, 2, generator=g)
        errors = []
        for s in (0.1, 0.4, 1.0):
            sigma = torch.full((512, 1), s)
            errors.append((self.denoise(self.net, clean + sigma * eps, sigma) - clean).pow(2).mean().item())
        return errors


def main():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29658")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    trainer = Trainer(rank, world)
    trainer.fit()
    errors = trainer.validate()
    if rank == 0:
        print("denoising error at sigma 0.1 / 0.4 / 1.0:", " ".join(f"{e:.5f}" for e in errors))
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
