"""One trunk, one head per data source: handwritten digits and wines share a batch."""
import argparse
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits, load_wine
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoHeads(nn.Module):
    def __init__(self, sizes, width=40):
        super().__init__()
        self.enter = nn.ModuleDict({k: nn.Linear(i, width) for k, (i, _) in sizes.items()})
        self.trunk = nn.Sequential(nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.leave = nn.ModuleDict({k: nn.Linear(width, o) for k, (_, o) in sizes.items()})

    def forward(self, batch):
        return {k: self.leave[k](self.trunk(self.enter[k](x))) for k, x in batch.items()}


class Mixture:
    """Draws a batch by source weights; the rows are laid out source after source and cut in equal pieces."""

    def __init__(self, sources, weights, batch, seed):
        self.sources, self.names, self.batch = sources, list(sources), batch
        self.p = np.array(weights) / np.sum(weights)
        self.rng = np.random.default_rng(seed)

    def draw(self, rank, world):
        counts = self.rng.multinomial(self.batch, self.p)
        rows = [(n, int(i)) for n, c in zip(self.names, counts)
                for i in self.rng.integers(0, len(self.sources[n][0]), c)]
        piece = rows[rank * self.batch // world:(rank + 1) * self.batch // world]
        out = {}
        for n in self.names:
            ids = [i for m, i in piece if m == n]
            if ids:
                out[n] = (self.sources[n][0][ids], self.sources[n][1][ids])
        return out


def table(loader, cut):
    x, y = loader(return_X_y=True)
    x = (x - x.mean(0)) / (x.std(0) + 1e-6)
    order = np.random.default_rng(0).permutation(len(x))[:cut]
    return torch.tensor(x[order], dtype=torch.float32), torch.tensor(y[order])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--lr", type=float, default=3e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    sources = {"digits": table(load_digits, 1200), "wine": table(load_wine, 150)}
    torch.manual_seed(15)
    net = DDP(TwoHeads({"digits": (64, 10), "wine": (13, 3)}), find_unused_parameters=True)
    opt = torch.optim.AdamW(net.parameters(), lr=args.lr)
    mixture = Mixture(sources, [0.55, 0.45], args.batch, seed=22)
    for step in range(args.steps):
        batch = mixture.draw(rank, world)
        out = net({k: x for k, (x, _) in batch.items()})
        sums = {k: F.cross_entropy(out[k], y, reduction="sum") for k, (_, y) in batch.items()}
        loss = sum(sums.values()) * world / args.batch
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 9:
            row = torch.tensor([[sums[k].item(), len(batch[k][1])] if k in sums else [0.0, 0.0] for k in sources])
            dist.all_reduce(row)
            if rank == 0:
                text = " ".join(f"{k} {s / max(c, 1):.6f} ({int(c)})" for k, (s, c) in zip(sources, row.tolist()))
                print(f"{step + 1} {text}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
