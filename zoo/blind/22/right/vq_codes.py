"""VQ-VAE on wave patches; the codebook follows the batch statistics by moving averages."""
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)


@dataclass
class Config:
    codes: int = 24
    dim: int = 6
    patch: int = 16
    batch: int = 96
    steps: int = 60
    decay: float = 0.9
    commit: float = 0.25
    lr: float = 2e-3


def patches(n, size, seed):
    g = torch.Generator().manual_seed(seed)
    grid = torch.linspace(-1, 1, size)
    a = 1 + 4 * torch.rand(n, 1, generator=g).round(decimals=1)
    b = torch.randint(0, 4, (n, 1), generator=g) * 0.8
    return torch.sin(a * grid + b) + 0.05 * torch.randn(n, size, generator=g)


class Comm:
    def __init__(self):
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        if self.world > 1:
            dist.init_process_group("gloo")

    def sum(self, t):
        if self.world > 1:
            dist.all_reduce(t)
        return t

    def rows(self, t):
        """All processes' rows, in the order of the batch."""
        if self.world == 1:
            return t
        parts = [torch.empty_like(t) for _ in range(self.world)]
        dist.all_gather(parts, t.contiguous())
        return torch.cat(parts)

    def close(self):
        if self.world > 1:
            dist.destroy_process_group()


class Codebook(nn.Module):
    def __init__(self, cfg, comm, generator):
        super().__init__()
        self.cfg, self.comm, self.generator = cfg, comm, generator
        vectors = torch.randn(cfg.codes, cfg.dim)
        self.register_buffer("vectors", vectors)
        self.register_buffer("size", torch.ones(cfg.codes))
        self.register_buffer("sum", vectors.clone())

    def forward(self, z):
        index = torch.cdist(z, self.vectors).argmin(1)
        chosen = self.vectors[index]
        if self.training:
            self.follow(z.detach(), index)
        return z + (chosen - z).detach(), F.mse_loss(z, chosen, reduction="sum"), index

    @torch.no_grad()
    def follow(self, z, index):
        onehot = F.one_hot(index, self.cfg.codes).to(z.dtype)
        count, total = self.comm.sum(onehot.sum(0)), self.comm.sum(onehot.T @ z)
        self.size.mul_(self.cfg.decay).add_(count, alpha=1 - self.cfg.decay)
        self.sum.mul_(self.cfg.decay).add_(total, alpha=1 - self.cfg.decay)
        unused = self.size < 0.05
        if unused.any():
            pool = self.comm.rows(z)
            pick = torch.randint(len(pool), (self.cfg.codes,), generator=self.generator)
            self.sum[unused] = pool[pick][unused]
            self.size[unused] = 1.0
        self.vectors.copy_(self.sum / self.size.unsqueeze(1))


class VQVAE(nn.Module):
    def __init__(self, cfg, comm, generator):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(cfg.patch, 32), nn.SiLU(), nn.Linear(32, cfg.dim))
        self.book = Codebook(cfg, comm, generator)
        self.dec = nn.Sequential(nn.Linear(cfg.dim, 32), nn.SiLU(), nn.Linear(32, cfg.patch))

    def forward(self, x):
        q, commit, index = self.book(self.enc(x))
        return self.dec(q), commit, index


def main():
    cfg, comm = Config(), Comm()
    train, test = patches(960, cfg.patch, 1), patches(192, cfg.patch, 2)
    torch.manual_seed(23)
    model = VQVAE(cfg, comm, generator=torch.Generator().manual_seed(29))
    opt = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    order = torch.Generator().manual_seed(37)

    for step in range(cfg.steps):
        rows = torch.randperm(len(train), generator=order)[: cfg.batch]
        x = train[rows.chunk(comm.world)[comm.rank]]
        recon, commit, _ = model(x)
        loss = F.mse_loss(recon, x, reduction="sum") / (cfg.batch * cfg.patch)
        loss = loss + cfg.commit * commit / (cfg.batch * cfg.dim)
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            comm.sum(p.grad)
        opt.step()
        value = comm.sum(loss.detach().clone())
        if comm.rank == 0 and step % 20 == 19:
            print(f"step {step + 1} loss {value:.6f}")

    model.eval()
    with torch.no_grad():
        x = test.chunk(comm.world)[comm.rank]
        recon, _, index = model(x)
        error = comm.sum(F.mse_loss(recon, x, reduction="sum")) / test.numel()
        use = comm.sum(torch.bincount(index, minlength=cfg.codes).to(x.dtype)) / len(test)
    perplexity = torch.exp(-(use * (use + 1e-12).log()).sum())
    if comm.rank == 0:
        print(f"test mse {error:.6f} code perplexity {perplexity:.4f}")
    comm.close()


if __name__ == "__main__":
    main()
