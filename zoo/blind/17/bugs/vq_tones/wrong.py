"""Vector-quantised autoencoder of short tones; the codebook is a moving average of the encodings."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

WINDOW, CODES, DIM = 32, 16, 6
BATCH = 32


class Codebook(nn.Module):
    def __init__(self, decay=0.9, commitment=0.25):
        super().__init__()
        self.decay, self.commitment = decay, commitment
        codes = torch.randn(DIM, CODES) * 0.5
        self.register_buffer("codes", codes)
        self.register_buffer("sizes", torch.ones(CODES))
        self.register_buffer("sums", codes.clone())

    @torch.no_grad()
    def update(self, z, onehot):
        sizes = onehot.sum(0)
        sums = (onehot.t() @ z).t()
        if dist.is_initialized():
            dist.all_reduce(sizes)
            dist.all_reduce(sums.contiguous())
        self.sizes.mul_(self.decay).add_(sizes, alpha=1 - self.decay)
        self.sums.mul_(self.decay).add_(sums, alpha=1 - self.decay)
        total = self.sizes.sum()
        smooth = (self.sizes + 1e-3) / (total + CODES * 1e-3) * total
        self.codes.copy_(self.sums / smooth)

    def forward(self, z):
        distance = z.square().sum(1, keepdim=True) - 2 * z @ self.codes + self.codes.square().sum(0)
        index = distance.argmin(1)
        quantised = self.codes.t()[index]
        if self.training:
            self.update(z, F.one_hot(index, CODES).to(z.dtype))
        penalty = self.commitment * (z - quantised).square().mean()
        return z + (quantised - z).detach(), penalty


class ToneCoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(WINDOW, 48), nn.GELU(), nn.Linear(48, DIM))
        self.book = Codebook()
        self.decode = nn.Sequential(nn.Linear(DIM, 48), nn.GELU(), nn.Linear(48, WINDOW))

    def forward(self, x):
        z, penalty = self.book(self.encode(x))
        return self.decode(z), penalty


def tones(n=512):
    g = torch.Generator().manual_seed(100)
    pitch = torch.randint(1, 7, (n, 1), generator=g)
    phase = torch.randint(0, 4, (n, 1), generator=g) * (math.pi / 2)
    time = torch.arange(WINDOW) * (2 * math.pi / WINDOW)
    return torch.sin(pitch * time + phase) + 0.1 * torch.randn(n, WINDOW, generator=g)


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(20)
    net = ToneCoder()
    model = DDP(net) if world > 1 else net
    optimizer = torch.optim.Adam(net.parameters(), lr=3e-3)
    data = tones()

    for epoch in range(4):
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(2)
        for rows in order.split(BATCH):
            x = data[rows[rank::world]]
            rebuilt, penalty = model(x)
            error = (rebuilt - x).square().mean()
            optimizer.zero_grad()
            (error + penalty).backward()
            optimizer.step()
            total += torch.stack([error.detach(), penalty.detach()])
        total /= world * len(data) / BATCH
        if world > 1:
            dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}  error {total[0].item():.8f}  commitment {total[1].item():.8f}")

    net.eval()
    with torch.no_grad():
        rebuilt, _ = net(data)
    if rank == 0:
        print(f"final error {(rebuilt - data).square().mean().item():.8f}")
        print(f"codes {net.book.codes.norm().item():.8f}  decoder {net.decode[0].weight.norm().item():.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
