import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

Z = 16


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(Z, 32 * 2 * 2)
        self.up1 = nn.ConvTranspose2d(32, 16, 4, 2, 1)
        self.up2 = nn.ConvTranspose2d(16, 1, 4, 2, 1)

    def forward(self, z):
        h = F.leaky_relu(self.fc(z), 0.2).view(-1, 32, 2, 2)
        return torch.tanh(self.up2(F.leaky_relu(self.up1(h), 0.2)))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, 2, 1), nn.LeakyReLU(0.2),
            nn.Conv2d(16, 32, 3, 2, 1), nn.LeakyReLU(0.2),
            nn.Flatten(), nn.Linear(32 * 4, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=1)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--lr-g", type=float, default=1e-3)
    ap.add_argument("--lr-d", type=float, default=5e-4)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    imgs = torch.tensor(load_digits().images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    ds = TensorDataset(imgs[:1728])
    sampler = DistributedSampler(ds, seed=args.seed, drop_last=True)
    loader = DataLoader(ds, args.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    G, D = DDP(Generator()), DDP(Critic())
    opt_g = torch.optim.Adam(G.parameters(), args.lr_g, betas=(0.5, 0.999))
    opt_d = torch.optim.Adam(D.parameters(), args.lr_d, betas=(0.5, 0.999))

    # own noise on each rank, the preview noise is shared
    noise = torch.Generator().manual_seed(1000 + args.seed * 97 + rank)
    preview = torch.randn(64, Z, generator=torch.Generator().manual_seed(7))
    g_avg = Generator()
    g_avg.load_state_dict(G.module.state_dict())

    it = 0
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            n = len(real)
            with torch.no_grad():
                fake = G(torch.randn(n, Z, generator=noise))
            scores = D(torch.cat([real, fake]))
            d_loss = F.softplus(-scores[:n]).mean() + F.softplus(scores[n:]).mean()
            opt_d.zero_grad()
            d_loss.backward()
            opt_d.step()

            g_loss = F.softplus(-D(G(torch.randn(n, Z, generator=noise)))).mean()
            opt_g.zero_grad()
            g_loss.backward()
            opt_g.step()
            with torch.no_grad():
                for a, p in zip(g_avg.parameters(), G.module.parameters()):
                    a.mul_(0.9).add_(p, alpha=0.1)
            it += 1
            if it % 9 == 0:
                m = torch.stack([d_loss.detach(), g_loss.detach()])
                dist.all_reduce(m)
                m /= world
                if rank == 0:
                    print(f"it {it}  D {m[0]:.4f}  G {m[1]:.4f}")

    if rank == 0:
        with torch.no_grad():
            pics = g_avg(preview)
        gap = (pics.mean(0) - imgs.mean(0)).abs().mean().item()
        print(f"mean image gap {gap:.4f}, pixel std {pics.std().item():.4f}")
        torch.save({"G": G.module.state_dict(), "D": D.module.state_dict(), "G_avg": g_avg.state_dict()}, "/tmp/gan_digits.pt")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
