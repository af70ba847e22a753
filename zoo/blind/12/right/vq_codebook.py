"""VQ-VAE on patches of digits: codebook by moving averages, first codes from the first batch, dead codes replaced."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


def all_sum(t):
    if world_size() > 1:
        dist.all_reduce(t)
    return t


def gather_rows(t):
    if world_size() == 1:
        return t
    parts = [torch.empty_like(t) for _ in range(world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


class VectorQuantizer(nn.Module):
    def __init__(self, codes=24, dim=6, decay=0.9, dead=0.5):
        super().__init__()
        self.decay, self.dead, self.codes = decay, dead, codes
        self.register_buffer("book", torch.zeros(codes, dim))
        self.register_buffer("size", torch.ones(codes))
        self.register_buffer("total", torch.zeros(codes, dim))
        self.register_buffer("ready", torch.zeros((), dtype=torch.bool))
        self.picker = torch.Generator().manual_seed(8)

    @torch.no_grad()
    def learn(self, flat, onehot):
        count, total = all_sum(onehot.sum(0)), all_sum(onehot.t() @ flat)
        self.size.lerp_(count, 1 - self.decay)
        self.total.lerp_(total, 1 - self.decay)
        dead = (self.size < self.dead).nonzero()[:, 0]
        if len(dead):
            rows = gather_rows(flat)
            fresh = rows[torch.randperm(len(rows), generator=self.picker)[: len(dead)]]
            self.size[dead] = 1.0
            self.total[dead] = fresh
        self.book.copy_(self.total / self.size[:, None])
        return count

    def forward(self, z):
        flat = z.reshape(-1, z.shape[-1])
        if self.training and not self.ready:
            with torch.no_grad():
                rows = gather_rows(flat)
                self.book.copy_(rows[torch.randperm(len(rows), generator=self.picker)[: self.codes]])
                self.total.copy_(self.book)
                self.ready.fill_(True)
        index = torch.cdist(flat.detach(), self.book).argmin(1)
        quantized = self.book[index].view_as(z)
        commit = F.mse_loss(z, quantized)
        count = self.learn(flat.detach(), F.one_hot(index, self.codes).float()) if self.training else None
        return z + (quantized - z).detach(), commit, count


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 48), nn.ReLU(), nn.Linear(48, 6))
        self.vq = VectorQuantizer()
        self.decoder = nn.Sequential(nn.Linear(24, 96), nn.ReLU(), nn.Linear(96, 64))

    def forward(self, x):
        patches = x.view(-1, 2, 4, 2, 4).transpose(2, 3).reshape(-1, 4, 16)
        z, commit, count = self.vq(self.encoder(patches))
        return self.decoder(z.flatten(1)), commit, count


def main(batch=96, epochs=3):
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(100 + rank)
    net = VQVAE()
    model = DDP(net) if world > 1 else net
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-6)
    x = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    train, held = x[:1440], x[1440:]
    n = batch // world
    for epoch in range(epochs):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        model.train()
        for start in range(0, len(train), batch):
            rows = train[order[start + rank * n: start + (rank + 1) * n]]
            out, commit, count = model(rows)
            loss = F.mse_loss(out, rows) + 0.25 * commit
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        usage = count / count.sum()
        perplexity = torch.exp(-(usage * (usage + 1e-10).log()).sum())
        net.eval()
        if rank == 0:
            with torch.no_grad():
                print(f"epoch {epoch} held-out {F.mse_loss(net(held)[0], held).item():.5f} perplexity {perplexity.item():.4f}", flush=True)
    if world > 1:
        dist.barrier()
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
