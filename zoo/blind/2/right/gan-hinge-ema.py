"""Small hinge GAN on digits with lazy R1 and an averaged generator."""
import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Digits(Dataset):
    def __init__(self, n):
        self.x = torch.tensor(load_digits().images[:n], dtype=torch.float32).unsqueeze(1) / 8 - 1

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i]


class Generator(nn.Module):
    def __init__(self, nz):
        super().__init__()
        self.nz = nz
        self.fc = nn.Linear(nz, 16 * 16)
        self.net = nn.Sequential(nn.GroupNorm(4, 16), nn.ReLU(), nn.ConvTranspose2d(16, 12, 4, 2, 1),
                                 nn.GroupNorm(4, 12), nn.ReLU(), nn.Conv2d(12, 1, 3, 1, 1), nn.Tanh())

    def forward(self, z):
        return self.net(self.fc(z).view(-1, 16, 4, 4))


def make_discriminator():
    return nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(16, 24, 3, 2, 1),
                         nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(24 * 4, 1))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=24, help="images per process")
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--nz", type=int, default=16)
    p.add_argument("--r1", type=float, default=0.5)
    p.add_argument("--r1-every", type=int, default=4)
    args = p.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    rank = dist.get_rank()
    torch.manual_seed(42)
    gen = DistributedDataParallel(Generator(args.nz))
    disc = DistributedDataParallel(make_discriminator())
    ema = AveragedModel(gen.module, multi_avg_fn=get_ema_multi_avg_fn(0.95))
    opt_g = torch.optim.Adam(gen.parameters(), lr=1e-3, betas=(0.0, 0.99))
    opt_d = torch.optim.Adam(disc.parameters(), lr=2e-3, betas=(0.0, 0.99))

    data = Digits(960)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=args.batch, sampler=sampler, drop_last=True)
    zgen = torch.Generator().manual_seed(7 + 31 * rank)
    fixed = torch.randn(64, args.nz, generator=torch.Generator().manual_seed(0))

    it = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for real in loader:
            z = torch.randn(len(real), args.nz, generator=zgen)
            with torch.no_grad():
                fake = gen.module(z)
            penalise = it % args.r1_every == 0
            real.requires_grad_(penalise)
            score_real, score_fake = disc(torch.cat([real, fake])).chunk(2)
            loss_d = torch.relu(1 - score_real).mean() + torch.relu(1 + score_fake).mean()
            if penalise:
                (g,) = torch.autograd.grad(score_real.sum(), real, create_graph=True)
                loss_d = loss_d + 0.5 * args.r1 * args.r1_every * g.square().sum((1, 2, 3)).mean()
            opt_d.zero_grad(set_to_none=True)
            loss_d.backward()
            opt_d.step()

            z = torch.randn(len(real), args.nz, generator=zgen)
            disc.module.requires_grad_(False)
            loss_g = -disc.module(gen(z)).mean()
            opt_g.zero_grad(set_to_none=True)
            loss_g.backward()
            disc.module.requires_grad_(True)
            opt_g.step()
            ema.update_parameters(gen.module)
            it += 1
        stats = torch.stack([loss_d.detach(), loss_g.detach()])
        dist.all_reduce(stats, op=dist.ReduceOp.SUM)
        stats /= dist.get_world_size()
        if rank == 0:
            with torch.no_grad():
                sample = ema(fixed)
            print(f"[{epoch}] it={it} D {stats[0]:.3f} G {stats[1]:.3f} "
                  f"sample mean {sample.mean():.3f} std {sample.std():.3f}")
    if rank == 0:
        torch.save({"ema": ema.module.state_dict(), "it": it}, "/tmp/gan_hinge_ema.pt")
    dist.barrier()


if __name__ == "__main__":
    main()
    time.sleep(0.3)
    dist.destroy_process_group()
