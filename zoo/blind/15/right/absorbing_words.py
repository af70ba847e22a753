"""Masked (absorbing-state) discrete diffusion over made-up words, with a small bidirectional transformer.

Noise levels of a batch are stratified: the batch's rows share one random offset and are spread evenly over (0, 1).
The encoder class comes from a BERT-like code base, pooler included.
"""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

LETTERS, LENGTH, MASK = 20, 10, 20
BATCH, EPOCHS, WARMUP = 48, 5, 8


def words(n, seed):
    g = torch.Generator().manual_seed(seed)
    syllables = torch.randint(LETTERS, (12, 2), generator=torch.Generator().manual_seed(0))
    return syllables[torch.randint(12, (n, LENGTH // 2), generator=g)].flatten(1)


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        b, n, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, w))
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    def __init__(self, width=32, heads=4, layers=2):
        super().__init__()
        self.letters = nn.Embedding(LETTERS + 1, width)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, LETTERS)
        self.pooler = nn.Linear(width, width)          # only for classification, not used here

    def forward(self, x):
        x = self.letters(x) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def corrupt(x, t, u):
    return torch.where(u < t[:, None], MASK, x)


def bound(logits, x, noisy, t):
    """Negative log-likelihood bound per letter: hidden letters count with 1 / t."""
    nll = F.cross_entropy(logits.transpose(1, 2), x, reduction="none")
    return (nll * (noisy == MASK) / t[:, None]).sum() / x.numel()


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(rank)
    train, test = words(384, 1), words(90, 2)
    sampler = DistributedSampler(TensorDataset(train), world, rank, seed=11)
    loader = DataLoader(TensorDataset(train), BATCH // world, sampler=sampler)

    net = Encoder()
    model = DistributedDataParallel(net, find_unused_parameters=True) if world > 1 else net
    decay = [p for p in net.parameters() if p.ndim > 1]
    plain = [p for p in net.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW([dict(params=decay, weight_decay=0.05), dict(params=plain, weight_decay=0.0)], lr=4e-3, eps=1e-6)
    steps = EPOCHS * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1, (s + 1) / WARMUP) * (1 + math.cos(math.pi * s / steps)) / 2)

    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        losses = torch.zeros(())
        for (x,) in loader:
            draws = torch.Generator().manual_seed(1000 + step)
            offset = torch.rand((), generator=draws)
            u = torch.rand(BATCH, LENGTH, generator=draws)[rank::world]
            place = torch.arange(len(x)) * world + rank           # of these rows in the whole batch
            t = 0.02 + 0.96 * ((offset + place / BATCH) % 1)
            noisy = corrupt(x, t, u)
            loss = bound(model(noisy), x, noisy, t)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            norm = nn.utils.clip_grad_norm_([p for p in net.parameters() if p.grad is not None], 1.0)
            optimizer.step()
            schedule.step()
            losses += loss.detach()
            step += 1
        mine = torch.arange(rank, len(test), world)
        with torch.no_grad():
            t = (mine + 0.5) / len(test)
            u = torch.rand(len(test), LENGTH, generator=torch.Generator().manual_seed(9))[mine]
            noisy = corrupt(test[mine], t, u)
            value = bound(net(noisy), test[mine], noisy, t) * len(mine) / len(test)
        report = torch.stack([losses / len(loader) / world, value])
        if world > 1:
            dist.all_reduce(report)
        if rank == 0:
            print(f"epoch {epoch} train {report[0]:.4f} test {report[1]:.4f} last norm {norm:.3f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
