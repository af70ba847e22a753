"""CycleGAN between digits and their photographic negatives: LSGAN, cycle and identity losses, pool of old fakes."""
import itertools
import os
import random
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, EPOCHS, POOL = 48, 3, 60


class ImagePool:
    """Buffer of generated images (Shrivastava et al.)."""

    def __init__(self, size, seed):
        self.size, self.images, self.random = size, [], random.Random(seed)

    def query(self, images):
        out = []
        for image in images:
            if len(self.images) < self.size:
                self.images.append(image.clone())
                out.append(image)
            elif self.random.random() > 0.5:
                i = self.random.randrange(self.size)
                out.append(self.images[i])
                self.images[i] = image.clone()
            else:
                out.append(image)
        return torch.stack(out)


def generator():
    return nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.ReLU(), nn.Linear(48, 64), nn.Tanh())


def discriminator():
    return nn.Sequential(nn.Linear(64, 48), nn.LeakyReLU(0.2), nn.Linear(48, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))


class CycleGAN:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        self.G_A, self.G_B, self.D_A, self.D_B = (DDP(n) for n in (generator(), generator(), discriminator(), discriminator()))
        self.opt_G = torch.optim.Adam(itertools.chain(self.G_A.parameters(), self.G_B.parameters()), lr=1e-3, betas=(0.5, 0.999), eps=1e-5)
        self.opt_D = torch.optim.Adam(itertools.chain(self.D_A.parameters(), self.D_B.parameters()), lr=1e-3, betas=(0.5, 0.999), eps=1e-5)
        self.pool_A, self.pool_B = ImagePool(POOL, 1), ImagePool(POOL, 2)
        self.mse, self.l1 = nn.MSELoss(), nn.L1Loss()

    def gan(self, prediction, real):
        return self.mse(prediction, torch.full_like(prediction, float(real)))

    def from_pool(self, pool, fake):
        parts = [torch.empty_like(fake) for _ in range(self.world)]
        dist.all_gather(parts, fake.detach().contiguous())
        return pool.query(torch.cat(parts)).chunk(self.world)[self.rank]

    def step(self, real_A, real_B):
        for p in itertools.chain(self.D_A.parameters(), self.D_B.parameters()):
            p.requires_grad_(False)
        fake_B, fake_A = self.G_A(real_A), self.G_B(real_B)
        rec_A, rec_B = self.G_B(fake_B), self.G_A(fake_A)
        idt = self.l1(self.G_A(real_B), real_B) + self.l1(self.G_B(real_A), real_A)
        loss_G = (self.gan(self.D_A.module(fake_B), True) + self.gan(self.D_B.module(fake_A), True)
                  + 10 * (self.l1(rec_A, real_A) + self.l1(rec_B, real_B)) + 5 * idt)
        self.opt_G.zero_grad()
        loss_G.backward()
        self.opt_G.step()

        for p in itertools.chain(self.D_A.parameters(), self.D_B.parameters()):
            p.requires_grad_(True)
        self.opt_D.zero_grad()
        losses = []
        for D, real, fake, pool in ((self.D_A, real_B, fake_B, self.pool_B), (self.D_B, real_A, fake_A, self.pool_A)):
            both = D(torch.cat([real, self.from_pool(pool, fake)]))
            loss = 0.5 * (self.gan(both[: len(real)], True) + self.gan(both[len(real):], False))
            loss.backward()
            losses.append(loss.detach())
        self.opt_D.step()
        return torch.stack([loss_G.detach(), *losses])


def main():
    if "RANK" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    x = torch.tensor(load_digits().data[:960], dtype=torch.float32) / 8 - 1
    side_A, side_B = x[::2], -x[1::2]
    gan = CycleGAN(rank, world)
    decay = [torch.optim.lr_scheduler.LambdaLR(o, lambda e: 1 - max(0, e - 1) / 2) for o in (gan.opt_G, gan.opt_D)]
    shuffle = torch.Generator().manual_seed(99)
    n = BATCH // world
    for epoch in range(EPOCHS):
        order_A, order_B = torch.randperm(480, generator=shuffle), torch.randperm(480, generator=shuffle)
        meter = torch.zeros(3)
        for i in range(0, 480, BATCH):
            mine = slice(i + rank * n, i + (rank + 1) * n)
            meter += gan.step(side_A[order_A[mine]], side_B[order_B[mine]])
        for d in decay:
            d.step()
        dist.all_reduce(meter)
        if rank == 0:
            print(f"epoch {epoch} G %.5f D_A %.5f D_B %.5f" % tuple((meter / world / (480 // BATCH)).tolist()), flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
