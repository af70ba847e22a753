"""VQ-VAE on digits, codebook learned with exponential moving averages."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class EMACodebook(nn.Module):
    def __init__(self, n_codes, dim, decay=0.9, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        codes = torch.randn(n_codes, dim) * 0.15
        self.register_buffer("codes", codes)
        self.register_buffer("counts", torch.ones(n_codes))
        self.register_buffer("sums", codes.clone())

    @torch.no_grad()
    def update(self, flat, idx):
        onehot = F.one_hot(idx, self.codes.size(0)).type_as(flat)
        n, s = onehot.sum(0), onehot.t() @ flat
        self.counts.mul_(self.decay).add_(n, alpha=1 - self.decay)
        self.sums.mul_(self.decay).add_(s, alpha=1 - self.decay)
        total = self.counts.sum()
        smoothed = (self.counts + self.eps) / (total + self.codes.size(0) * self.eps) * total
        self.codes.copy_(self.sums / smoothed[:, None])

    def forward(self, z):
        flat = z.reshape(-1, z.size(-1))
        d = flat.pow(2).sum(1, keepdim=True) - 2 * flat @ self.codes.t() + self.codes.pow(2).sum(1)
        idx = d.argmin(1)
        q = self.codes[idx].view_as(z)
        if self.training:
            self.update(flat.detach(), idx)
        commit = F.mse_loss(z, q.detach())
        return z + (q - z).detach(), commit, idx


class VQVAE(nn.Module):
    def __init__(self, n_codes=24, dim=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(16, dim, 3, padding=1))
        self.book = EMACodebook(n_codes, dim)
        self.dec = nn.Sequential(nn.Conv2d(dim, 16, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(16, 1, 2, stride=2))

    def forward(self, x):
        z = self.enc(x).permute(0, 2, 3, 1)
        q, commit, idx = self.book(z)
        return self.dec(q.permute(0, 3, 1, 2)), commit, idx


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch", type=int, default=72)
    p.add_argument("--beta", type=float, default=0.25)
    a = p.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(13)
    x = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    data = TensorDataset(x[:1440])
    sampler = DistributedSampler(data, shuffle=True, seed=2)
    loader = DataLoader(data, a.batch // world, sampler=sampler, drop_last=True)

    model = DDP(VQVAE())
    opt = torch.optim.Adam(model.parameters(), lr=4e-3)
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        model.train()
        acc = torch.zeros(2)
        for (xb,) in loader:
            out, commit, _ = model(xb)
            rec = F.mse_loss(out, xb)
            opt.zero_grad()
            (rec + a.beta * commit).backward()
            opt.step()
            acc += torch.stack([rec.detach(), commit.detach()])
        dist.all_reduce(acc)
        acc /= world * len(loader)
        net = model.module.eval()
        with torch.no_grad():
            out, _, idx = net(x[1440:])
            val = F.mse_loss(out, x[1440:]).item()
            share = torch.bincount(idx, minlength=24).float() / idx.numel()
            perplexity = torch.exp(-(share * (share + 1e-10).log()).sum()).item()
        if rank == 0:
            print(f"epoch {epoch}: rec {acc[0]:.4f} commit {acc[1]:.4f} val {val:.4f} perplexity {perplexity:.2f}", flush=True)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
