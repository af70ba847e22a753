"""VQ autoencoder for 4x4 image tiles; the codebook follows the encoder by moving averages."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_default_dtype(torch.float64)

CODES, DIM = 32, 8
BATCH, STEPS = 128, 40


class Codebook(nn.Module):
    def __init__(self, codes, dim, decay=0.9):
        super().__init__()
        self.decay = decay
        table = torch.randn(codes, dim) * 0.3
        self.register_buffer("table", table)
        self.register_buffer("usage", torch.ones(codes))
        self.register_buffer("sums", table.clone())

    def forward(self, z):
        with torch.no_grad():
            distance = torch.cdist(z, self.table)
            index = distance.argmin(1)
        quantized = F.embedding(index, self.table)
        if self.training:
            self.update(z.detach(), index)
        return quantized, index

    @torch.no_grad()
    def update(self, z, index):
        onehot = F.one_hot(index, self.usage.numel()).to(z.dtype)
        counts = onehot.sum(0)
        totals = onehot.T @ z
        dist.all_reduce(counts)
        dist.all_reduce(totals)
        self.usage.lerp_(counts, 1 - self.decay)
        self.sums.lerp_(totals, 1 - self.decay)
        n = self.usage.sum()
        smoothed = (self.usage + 1e-3) / (n + CODES * 1e-3) * n
        self.table.copy_(self.sums / smoothed.unsqueeze(1))


class TileVQ(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, DIM))
        self.codebook = Codebook(CODES, DIM)
        self.decoder = nn.Sequential(nn.Linear(DIM, 48), nn.GELU(), nn.Linear(48, 16))

    def forward(self, tiles):
        z = self.encoder(tiles)
        quantized, index = self.codebook(z)
        commit = F.mse_loss(z, quantized)
        straight = z + (quantized - z).detach()
        return F.mse_loss(self.decoder(straight), tiles), commit, index


def load_tiles():
    images = torch.tensor(load_digits().images) / 16.0
    tiles = images.unfold(1, 4, 4).unfold(2, 4, 4).reshape(-1, 16)
    return tiles[:6000], tiles[6000:7000]


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    train, held_out = load_tiles()
    torch.manual_seed(8)
    model = DDP(TileVQ())
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    pick = torch.Generator().manual_seed(77)

    for step in range(STEPS):
        rows = torch.randint(0, len(train), (BATCH,), generator=pick)
        tiles = train[rows[rank::world]]
        reconstruction, commit, _ = model(tiles)
        loss = reconstruction + 0.25 * commit
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1:3d} loss {shown.item() / world:.6f}")

    model.eval()
    if rank == 0:
        with torch.no_grad():
            error, _, index = model.module(held_out)
        print(f"held-out mse {error.item():.6f} codes used {index.unique().numel()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
