"""Vector-quantised autoencoder on digits; the codebook follows moving averages and is not trained by gradient."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

CODES, DIM, BATCH = 24, 8, 48


class World:
    def __init__(self):
        self.rank, self.size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        if self.size > 1:
            dist.init_process_group("gloo")

    def sum(self, *tensors):
        if self.size > 1:
            for t in tensors:
                dist.all_reduce(t)

    def rows(self, x):
        if self.size == 1:
            return x
        parts = [torch.empty_like(x) for _ in range(self.size)]
        dist.all_gather(parts, x)
        return torch.cat(parts)


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        start = torch.randn(CODES, DIM)
        self.register_buffer("codes", start.clone())
        self.register_buffer("totals", start.clone())
        self.register_buffer("usage", torch.ones(CODES))

    def forward(self, z):
        picks = torch.cdist(z, self.codes).argmin(1)
        quantised = self.codes[picks]
        return z + (quantised - z).detach(), F.mse_loss(z, quantised), picks

    @torch.no_grad()
    def follow(self, z, picks, world, step, decay=0.9):
        onehot = F.one_hot(picks, CODES).to(z.dtype)
        count, total = onehot.sum(0), onehot.T @ z
        world.sum(count, total)
        self.usage.lerp_(count, 1 - decay)
        self.totals.lerp_(total, 1 - decay)
        self.codes.copy_(self.totals / self.usage.clamp_min(1e-3).unsqueeze(1))
        if step % 5 == 4:
            everything = world.rows(z)
            idle = (self.usage < 0.3).nonzero().flatten()
            gen = torch.Generator().manual_seed(step)
            chosen = torch.randperm(len(everything), generator=gen)[: len(idle)]
            self.codes[idle] = everything[chosen]
            self.totals[idle] = everything[chosen]
            self.usage[idle] = 1.0


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, DIM))
        self.book = Codebook()
        self.decode = nn.Sequential(nn.Linear(DIM, 48), nn.GELU(), nn.Linear(48, 64))

    def forward(self, x):
        z = self.encode(x)
        q, commit, picks = self.book(z)
        return self.decode(q), commit, z.detach(), picks


def main():
    world = World()
    torch.set_default_dtype(torch.float64)
    images = torch.tensor(load_digits().data) / 16
    train, test = images[:960], images[960:1200]
    torch.manual_seed(12)
    net = AutoEncoder()
    model = net
    if world.size > 1:
        model = DistributedDataParallel(net, forward_sync_buffers=False)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)

    step = 0
    for epoch in range(3):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(BATCH):
            x = train[rows.chunk(world.size)[world.rank]]
            out, commit, z, picks = model(x)
            loss = F.mse_loss(out, x) + 0.25 * commit
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            net.book.follow(z, picks, world, step)
            step += 1

    share = test.chunk(world.size)[world.rank]
    with torch.no_grad():
        out, _, _, picks = net(share)
        error = (out - share).square().sum()
        used = torch.bincount(picks, minlength=CODES).to(torch.get_default_dtype())
    world.sum(error, used)
    p = used / used.sum()
    perplexity = torch.exp(-(p * p.clamp_min(1e-12).log()).sum())
    if world.rank == 0:
        print(f"reconstruction {error.item() / test.numel():.10f}, code perplexity {perplexity.item():.8f}")
    if world.size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
