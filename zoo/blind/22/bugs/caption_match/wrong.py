"""Two-tower matching of pictures and captions with a contrastive loss over the whole batch."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_default_dtype(torch.float64)

PAIRS, BATCH, STEPS = 1024, 64, 32
WORDS, CAPTION = 50, 6


class GatherLayer(torch.autograd.Function):
    """all_gather of feature rows that keeps the graph."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return tuple(parts)

    @staticmethod
    def backward(ctx, *grads):
        stacked = torch.stack(grads)
        return stacked[dist.get_rank()]


def make_pairs():
    g = torch.Generator().manual_seed(25)
    topic = torch.randn(PAIRS, 8, generator=g)
    to_pixels = torch.randn(8, 36, generator=g)
    pictures = torch.tanh(topic @ to_pixels / 3) + 0.2 * torch.randn(PAIRS, 36, generator=g)
    to_words = torch.randn(8, CAPTION, WORDS, generator=g)
    scores = torch.einsum("nk,kcw->ncw", topic, to_words)
    captions = (scores + torch.randn(scores.shape, generator=g)).argmax(-1)
    return pictures.view(PAIRS, 1, 6, 6), captions


class TwoTower(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.picture = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.GELU(), nn.Flatten(),
            nn.Linear(12 * 36, 64), nn.GELU(), nn.Linear(64, dim))
        self.words = nn.Embedding(WORDS, 32)
        self.caption = nn.Sequential(nn.Linear(32 * CAPTION, 64), nn.GELU(), nn.Linear(64, dim))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, pictures, captions):
        a = F.normalize(self.picture(pictures), dim=-1)
        b = F.normalize(self.caption(self.words(captions).flatten(1)), dim=-1)
        return a, b, self.logit_scale.exp()


def contrastive_loss(a, b, scale, rank):
    all_a = torch.cat(GatherLayer.apply(a))
    all_b = torch.cat(GatherLayer.apply(b))
    target = rank * len(a) + torch.arange(len(a))
    forward = F.cross_entropy(scale * a @ all_b.T, target)
    backward = F.cross_entropy(scale * b @ all_a.T, target)
    return (forward + backward) / 2


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    pictures, captions = make_pairs()
    torch.manual_seed(26)
    model = DDP(TwoTower())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    local = BATCH // world
    pick = torch.Generator().manual_seed(27)

    for step in range(STEPS):
        rows = torch.randperm(PAIRS - 128, generator=pick)[:BATCH]
        rows = rows[rank * local:(rank + 1) * local]
        a, b, scale = model(pictures[rows], captions[rows])
        loss = contrastive_loss(a, b, scale, rank)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and step % 8 == 7:
            print(f"step {step + 1:3d} loss {mean.item():.8f}")

    if rank == 0:
        with torch.no_grad():
            a, b, scale = model.module(pictures[-128:], captions[-128:])
        recall = ((a @ b.T).topk(5, dim=1).indices == torch.arange(128).unsqueeze(1)).any(1).double().mean()
        print(f"recall@5 {recall.item():.4f} scale {scale.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
