"""Embedding of digits with a margin softmax; quality is the share of queries whose nearest gallery item
has the same class."""
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


@dataclass
class Settings:
    steps: int = 36
    batch: int = 80
    lr: float = 0.08
    scale: float = 10.0
    margin: float = 0.2
    every: int = 12
    scores: list = field(default_factory=list)


class Embedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.PReLU(64), nn.Linear(64, 16))
        self.centres = nn.Parameter(torch.randn(10, 16))

    def embed(self, x):
        return F.normalize(self.body(x), dim=1)

    def forward(self, x, y, scale, margin):
        cosine = self.embed(x) @ F.normalize(self.centres, dim=1).T
        return F.cross_entropy(scale * (cosine - margin * F.one_hot(y, 10)), y)


def collect(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def retrieval(model, gallery, queries):
    """gallery, queries: this rank's (images, labels)."""
    with torch.no_grad():
        g, q = model.embed(gallery[0]), model.embed(queries[0])
        g_labels = gallery[1]
        nearest = (q @ g.T).argmax(1)
        hits = (g_labels[nearest] == queries[1]).sum()
    total = collect(torch.stack([hits, torch.tensor(len(q))])[None]).sum(0)
    return (total[0] / total[1]).item()


def main(cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    raw = load_digits()
    x, y = torch.tensor(raw.data / 16), torch.tensor(raw.target)
    mine = lambda lo, hi: (x[lo:hi][rank::world], y[lo:hi][rank::world])
    gallery, queries = mine(1300, 1380), mine(1380, 1780)
    torch.manual_seed(3)
    model = Embedder()
    opt = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.9)
    shuffle = torch.Generator().manual_seed(50)
    for step in range(cfg.steps):
        idx = torch.randint(1300, (cfg.batch,), generator=shuffle)[rank::world]
        loss = model(x[idx], y[idx], cfg.scale, cfg.margin)
        model.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        opt.step()
        if (step + 1) % cfg.every == 0:
            cfg.scores.append(retrieval(model, gallery, queries))
            if rank == 0:
                print(f"step {step + 1}: nearest-neighbour accuracy {cfg.scores[-1]:.4f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    settings = Settings()
    main(settings)
    time.sleep(0.3)
    dist.destroy_process_group()
