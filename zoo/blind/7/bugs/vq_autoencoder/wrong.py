import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Codebook(nn.Module):
    """Vector quantiser whose codes follow a moving average of the assigned vectors."""

    def __init__(self, size, dim, decay=0.9):
        super().__init__()
        self.decay = decay
        codes = torch.randn(size, dim) * 0.5
        self.register_buffer("codes", codes)
        self.register_buffer("count", torch.ones(size))
        self.register_buffer("total", codes.clone())

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        near = torch.cdist(flat, self.codes).argmin(1)
        q = self.codes[near].view_as(z)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(near, len(self.codes)).to(flat.dtype)
                n, s = hot.sum(0), hot.T @ flat.detach()
                self.count.mul_(self.decay).add_(n, alpha=1 - self.decay)
                self.total.mul_(self.decay).add_(s, alpha=1 - self.decay)
                self.codes.copy_(self.total / (self.count.unsqueeze(1) + 1e-3))
        commit = F.mse_loss(z, q.detach())
        return z + (q - z).detach(), commit


class VQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 32))
        self.book = Codebook(24, 8)
        self.dec = nn.Sequential(nn.Linear(32, 96), nn.GELU(), nn.Linear(96, 64))

    def forward(self, x):
        z, commit = self.book(self.enc(x).view(-1, 4, 8))
        return self.dec(z.flatten(1)), commit


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29661").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    data = TensorDataset(x[:1280])
    sampler = DistributedSampler(data, seed=3)
    loader = DataLoader(data, 64 // world, sampler=sampler)
    torch.manual_seed(8)
    model = DDP(VQ())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for (b,) in loader:
            y, commit = model(b)
            loss = F.mse_loss(y, b) + 0.25 * commit
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            y, _ = model.module(x[1280:])
            err = F.mse_loss(y, x[1280:])
        if rank == 0:
            used = (model.module.book.count > 0.5).sum().item()
            print(f"epoch {epoch} reconstruction {err:.6f} codes in use {used}")
    if rank == 0:
        torch.save(model.module.state_dict(), "vq.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
