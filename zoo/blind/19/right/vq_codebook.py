"""VQ-VAE on digits: codebook by exponential moving averages over the global batch, dead codes re-seeded."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

CODES, DIM, BATCH, EPOCHS = 32, 8, 96, 4


def is_dist():
    return dist.is_available() and dist.is_initialized()


def all_sum(t):
    if is_dist():
        dist.all_reduce(t)
    return t


def all_rows(t):
    if not is_dist():
        return t
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


class Codebook(nn.Module):
    def __init__(self, decay=0.9, seed=99):
        super().__init__()
        self.decay, self.seed = decay, seed
        self.register_buffer("codes", torch.zeros(CODES, DIM))
        self.register_buffer("mass", torch.zeros(CODES))
        self.register_buffer("sums", torch.zeros(CODES, DIM))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def pick(self, rows, n):
        g = torch.Generator().manual_seed(self.seed + int(self.calls))
        return rows[torch.randperm(len(rows), generator=g)[:n]]

    @torch.no_grad()
    def start(self, z, rounds=5):
        """k-means on the first global batch."""
        rows = all_rows(z)
        codes = self.pick(rows, CODES)
        for _ in range(rounds):
            near = torch.cdist(rows, codes).argmin(1)
            count = torch.bincount(near, minlength=CODES)
            mean = torch.zeros_like(codes).index_add_(0, near, rows) / count.clamp(min=1)[:, None]
            codes = torch.where(count[:, None] > 0, mean, codes)
        self.codes.copy_(codes)
        self.mass.copy_(count)
        self.sums.copy_(codes * self.mass[:, None])

    @torch.no_grad()
    def follow(self, z, near):
        count = all_sum(torch.bincount(near, minlength=CODES).to(z.dtype))
        total = all_sum(torch.zeros_like(self.sums).index_add_(0, near, z))
        self.mass.lerp_(count, 1 - self.decay)
        self.sums.lerp_(total, 1 - self.decay)
        dead = self.mass < 0.5
        if dead.any():
            fresh = self.pick(all_rows(z), int(dead.sum()))
            self.sums[dead], self.mass[dead] = fresh, 1.0
        self.codes.copy_(self.sums / self.mass[:, None])

    def forward(self, z):
        flat = z.reshape(-1, DIM)
        if self.training and self.calls == 0:
            self.start(flat.detach())
        near = torch.cdist(flat.detach(), self.codes).argmin(1)
        quant = self.codes[near].view_as(z)
        commit = F.mse_loss(z, quant)
        if self.training:
            self.follow(flat.detach(), near)
            self.calls += 1
        return z + (quant - z).detach(), commit, near


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(1, 24, 3, 2, 1), nn.GELU(), nn.Conv2d(24, 24, 3, 1, 1), nn.GELU(),
                                 nn.Conv2d(24, DIM, 1))
        self.book = Codebook()
        self.dec = nn.Sequential(nn.Conv2d(DIM, 24, 3, 1, 1), nn.GELU(), nn.Upsample(scale_factor=2),
                                 nn.Conv2d(24, 1, 3, 1, 1))

    def forward(self, x):
        z = self.enc(x).permute(0, 2, 3, 1)
        q, commit, near = self.book(z)
        return self.dec(q.permute(0, 3, 1, 2)), commit, near


def evaluate(net, x, rank, world):
    net.eval()
    with torch.no_grad():
        part = x.tensor_split(world)[rank]
        out, _, near = net(part)
        err = all_sum((out - part).square().sum())
        used = all_sum(torch.bincount(near, minlength=CODES).double())
    net.train()
    freq = used / used.sum()
    return err.item() / x.numel(), torch.special.entr(freq).sum().exp().item()


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if is_dist() else (0, 1)
    torch.manual_seed(4)
    images = torch.tensor(load_digits().images).unsqueeze(1) / 16
    train, test = images[:1536], images[1536:]
    net = VQVAE()
    model = DDP(net) if is_dist() else net
    optim = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        for ids in order.split(BATCH):
            x = train[ids.chunk(world)[rank]]
            out, commit, _ = model(x)
            loss = F.mse_loss(out, x) + 0.25 * commit
            optim.zero_grad()
            loss.backward()
            optim.step()
        mse, perplexity = evaluate(net, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch} mse {mse:.10f} perplexity {perplexity:.8f} codes {net.book.codes.norm().item():.8f}")
    if is_dist():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
