"""VQ-VAE on digit strips with a codebook kept by moving averages and revived when codes die."""
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, EPOCHS, CODES, DIM, DECAY = 80, 3, 24, 6, 0.9


class Codebook(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.rank, self.world = rank, world
        self.register_buffer("codes", torch.zeros(CODES, DIM))
        self.register_buffer("count", torch.ones(CODES))
        self.register_buffer("total", torch.zeros(CODES, DIM))
        self.draw = torch.Generator().manual_seed(71)

    def everyone(self, z):
        if self.world == 1:
            return z
        parts = [torch.empty_like(z) for _ in range(self.world)]
        dist.all_gather(parts, z.contiguous())
        return torch.cat(parts)

    @torch.no_grad()
    def seed(self, z):
        pool = self.everyone(z)
        picked = torch.randperm(len(pool), generator=self.draw)[:CODES]
        self.codes.copy_(pool[picked])
        self.total.copy_(self.codes)

    def nearest(self, z):
        return torch.cdist(z, self.codes).argmin(1)

    @torch.no_grad()
    def learn(self, z, index):
        hot = F.one_hot(index, CODES).to(z.dtype)
        stats = torch.cat([hot.sum(0)[:, None], hot.T @ z], 1)
        if self.world > 1:
            dist.all_reduce(stats)
        self.count.lerp_(stats[:, 0], 1 - DECAY)
        self.total.lerp_(stats[:, 1:], 1 - DECAY)
        n = self.count.sum()
        smooth = (self.count + 1e-5) / (n + CODES * 1e-5) * n
        self.codes.copy_(self.total / smooth[:, None])
        pool = self.everyone(z)
        dead = (self.count < 1.5).nonzero().flatten()
        if len(dead):
            fresh = pool[torch.randint(len(pool), (len(dead),), generator=self.draw)]
            self.codes[dead] = fresh
            self.total[dead] = fresh * 2
            self.count[dead] = 2.0
        return len(dead)


class Coder(nn.Module):
    """Every row of an 8x8 digit becomes one code."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, DIM))
        self.decode = nn.Sequential(nn.Linear(DIM, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, rows, book):
        z = self.encode(rows)
        index = book.nearest(z.detach())
        q = book.codes[index]
        image = self.decode(z + (q - z).detach())
        return F.mse_loss(image, rows), F.mse_loss(z, q), z.detach(), index


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1
    torch.set_default_dtype(torch.float64)

    images = torch.tensor(load_digits().images)[:1600] / 16.0
    noise = torch.Generator().manual_seed(3)
    images = images + 0.01 * torch.randn(images.shape, generator=noise)

    torch.manual_seed(25)
    coder, book = Coder(), Codebook(rank, world)
    model = DDP(coder) if dist.is_initialized() else coder
    opt = torch.optim.Adam(coder.parameters(), lr=3e-3)
    share = BATCH // world

    def rows_of(batch):
        return images[batch[rank * share:(rank + 1) * share]].reshape(-1, 8)

    for epoch in range(EPOCHS):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        totals, revived = torch.zeros(2), 0
        for i, batch in enumerate(order.split(BATCH)):
            rows = rows_of(batch)
            if epoch == 0 and i == 0:
                with torch.no_grad():
                    book.seed(coder.encode(rows))
            picture, commit, z, index = model(rows, book)
            opt.zero_grad()
            (picture + 0.25 * commit).backward()
            opt.step()
            revived += book.learn(z, index)
            totals += torch.stack([picture.detach(), commit.detach()])
        if world > 1:
            dist.all_reduce(totals)
        picture, commit = (totals / world / (len(images) // BATCH)).tolist()
        if rank == 0:
            share_of = book.count / book.count.sum()
            perplexity = (-(share_of * share_of.clamp(min=1e-12).log()).sum()).exp()
            print(f"epoch {epoch}: picture {picture:.10f} commit {commit:.10f} "
                  f"perplexity {perplexity:.8f} revived {revived}")

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
