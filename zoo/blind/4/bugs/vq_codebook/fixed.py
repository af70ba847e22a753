"""VQ autoencoder on quarter images of digits; the codebook follows by exponential averages."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP


class EMACodebook(nn.Module):
    def __init__(self, codes, dim, decay=0.9):
        super().__init__()
        self.decay = decay
        start = torch.randn(codes, dim) * 0.5
        self.register_buffer("codes", start.clone())
        self.register_buffer("usage", torch.ones(codes))
        self.register_buffer("total", start.clone())

    def forward(self, z):
        nearest = torch.cdist(z.detach(), self.codes).argmin(1)
        q = F.embedding(nearest, self.codes).clone()
        if self.training:
            self.follow(z.detach(), nearest)
        return z + (q - z).detach(), F.mse_loss(z, q), nearest

    @torch.no_grad()
    def follow(self, z, nearest):
        onehot = F.one_hot(nearest, self.codes.size(0)).to(z.dtype)
        count = onehot.sum(0)
        sums = onehot.t() @ z
        dist.all_reduce(count)
        dist.all_reduce(sums)
        self.usage.lerp_(count, 1 - self.decay)
        self.total.lerp_(sums, 1 - self.decay)
        self.codes.copy_(self.total / self.usage.clamp(min=1e-2).unsqueeze(1))


class PatchVQ(nn.Module):
    def __init__(self, codes=24, dim=8):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, dim))
        self.book = EMACodebook(codes, dim)
        self.decoder = nn.Sequential(nn.Linear(dim, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, patches):
        q, commit, nearest = self.book(self.encoder(patches))
        return self.decoder(q), commit, nearest


def patches_of_digits():
    images = torch.tensor(load_digits().images, dtype=torch.float32) / 16
    p = images.unfold(1, 4, 4).unfold(2, 4, 4)          # n, 2, 2, 4, 4
    return p.reshape(-1, 16)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=48)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--beta", type=float, default=0.25)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    data = patches_of_digits()
    model = DDP(PatchVQ())
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    draw = torch.Generator().manual_seed(args.seed + 100)
    share = args.batch // world

    for step in range(args.steps):
        rows = torch.randint(len(data), (args.batch,), generator=draw)
        x = data[rows[rank * share:(rank + 1) * share]]
        recon, commit, nearest = model(x)
        loss = F.mse_loss(recon, x) + args.beta * commit
        optim.zero_grad()
        loss.backward()
        optim.step()
        if (step + 1) % 12 == 0:
            stats = torch.stack([loss.detach(), commit.detach()])
            dist.all_reduce(stats)
            if rank == 0:
                size = model.module.book.codes.norm(dim=1).mean()
                print(f"step {step + 1:3d} loss {stats[0] / world:.6f} commit {stats[1] / world:.6f} code norm {size:.6f}")

    model.eval()
    with torch.no_grad():
        recon, _, nearest = model.module(data)
    if rank == 0:
        print(f"reconstruction {F.mse_loss(recon, data):.6f}, {nearest.unique().numel()} codes in use")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
