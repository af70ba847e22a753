"""Vector-quantised autoencoder: the code book is a buffer that follows its members, no gradient involved."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class CodeBook(nn.Module):
    def __init__(self, codes, dim, decay=0.9):
        super().__init__()
        self.decay = decay
        start = 0.2 * torch.randn(codes, dim)
        self.register_buffer("codes", start)
        self.register_buffer("size", torch.ones(codes))
        self.register_buffer("total", start.clone())

    def forward(self, z):
        index = torch.cdist(z.detach(), self.codes).argmin(1)
        q = self.codes[index]
        if self.training:
            self.follow(z.detach(), index)
        return z + (q - z).detach(), ((z - q.detach()) ** 2).mean()

    @torch.no_grad()
    def follow(self, z, index):
        hot = F.one_hot(index, len(self.codes)).float()
        news = torch.cat([hot.sum(0)[:, None], hot.T @ z], 1)
        dist.all_reduce(news)
        self.size.mul_(self.decay).add_(news[:, 0], alpha=1 - self.decay)
        self.total.mul_(self.decay).add_(news[:, 1:], alpha=1 - self.decay)
        n = self.size.sum()
        smooth = (self.size + 1e-3) / (n + len(self.codes) * 1e-3) * n
        self.codes = self.total / smooth[:, None]


class VQ(nn.Module):
    def __init__(self, parts=4, dim=6, codes=24):
        super().__init__()
        self.parts, self.dim = parts, dim
        self.enc = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, parts * dim))
        self.book = CodeBook(codes, dim)
        self.dec = nn.Sequential(nn.Linear(parts * dim, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x):
        z = self.enc(x).view(-1, self.dim)
        q, commit = self.book(z)
        return F.mse_loss(self.dec(q.view(len(x), -1)), x) + 0.25 * commit


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    torch.manual_seed(64)
    model = DDP(VQ(), broadcast_buffers=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    g = torch.Generator().manual_seed(2)
    for step in range(args.steps):
        rows = torch.randperm(len(x), generator=g)[:args.batch][rank::world]
        loss = model(x[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 8 == 7:
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0:
                used = (model.module.book.size > 0.5).sum().item()
                print(f"step {step + 1} loss {shown.item():.5f} codes in use {used}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
