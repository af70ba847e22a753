"""Small GAN on 8x8 digits. torchrun --nproc-per-node=N train.py --steps 50"""
import argparse
import random
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


def make_generator(z_dim):
    return nn.Sequential(nn.Linear(z_dim, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2),
                         nn.Linear(64, 64), nn.Tanh())


def make_discriminator():
    return nn.Sequential(nn.Linear(64, 96), nn.LeakyReLU(0.2), nn.Linear(96, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))


def endless(loader, sampler):
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


class GanTrainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.G = DDP(make_generator(args.z_dim))
        self.D = DDP(make_discriminator())
        self.opt_g = torch.optim.Adam(self.G.parameters(), lr=args.lr_g, betas=(0.5, 0.999))
        self.opt_d = torch.optim.Adam(self.D.parameters(), lr=args.lr_d, betas=(0.5, 0.999))

        data = torch.tensor(load_digits().data[:1200], dtype=torch.float32) / 8.0 - 1.0
        ds = TensorDataset(data)
        sampler = DistributedSampler(ds, shuffle=True, seed=args.seed, drop_last=True)
        loader = DataLoader(ds, batch_size=args.batch_size // self.world, sampler=sampler, drop_last=True)
        self.data = endless(loader, sampler)
        self.noise = torch.Generator().manual_seed(args.seed + 1000 * self.rank)
        self.d_updates = 0

    def sample(self, n):
        return self.G(torch.randn(n, self.args.z_dim, generator=self.noise))

    def discriminator_step(self, real):
        n = len(real)
        with torch.no_grad():
            fake = self.sample(n)
        logits = self.D(torch.cat([real, fake])).squeeze(1)
        target = torch.cat([torch.full((n,), 0.9), torch.zeros(n)])
        loss = F.binary_cross_entropy_with_logits(logits, target)
        self.opt_d.zero_grad()
        loss.backward()
        acc = ((logits > 0) == (target > 0.5)).float().mean()
        # keep the discriminator from running away
        if acc.item() < self.args.d_max_acc:
            self.opt_d.step()
            self.d_updates += 1
        return loss.item(), acc.item()

    def generator_step(self, n):
        loss = F.softplus(-self.D(self.sample(n))).mean()
        self.opt_g.zero_grad()
        loss.backward()
        self.opt_g.step()
        return loss.item()

    def run(self):
        for step in range(1, self.args.steps + 1):
            real, = next(self.data)
            d_loss, acc = self.discriminator_step(real)
            g_loss = self.generator_step(len(real))
            if self.rank == 0 and step % 10 == 0:
                print(f"step {step:3d}  D {d_loss:.3f}  G {g_loss:.3f}  acc {acc:.2f}  D updates {self.d_updates}",
                      flush=True)
        if self.rank == 0:
            torch.save({"G": self.G.module.state_dict(), "D": self.D.module.state_dict(),
                        "opt_g": self.opt_g.state_dict(), "opt_d": self.opt_d.state_dict()}, self.args.out)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=50)
    ap.add_argument("--batch-size", type=int, default=48, help="over all processes")
    ap.add_argument("--z-dim", type=int, default=16)
    ap.add_argument("--lr-g", type=float, default=1e-3)
    ap.add_argument("--lr-d", type=float, default=2e-3)
    ap.add_argument("--d-max-acc", type=float, default=0.85)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--out", default="gan.pt")
    args = ap.parse_args()
    random.seed(args.seed)
    dist.init_process_group("gloo")
    GanTrainer(args).run()
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
