"""Contrastive pre-training: the whole NT-Xent matrix over the features of all processes, then a nearest-centroid probe."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
        self.proj = nn.Sequential(nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x):
        h = self.trunk(x)
        return h, F.normalize(self.proj(h), dim=1)


def everybody(z):
    parts = [torch.empty_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, z.detach())
    parts[dist.get_rank()] = z
    return torch.cat(parts)


def nt_xent(a, b, tau):
    z = torch.cat([a, b])
    n = len(a)
    sim = (z @ z.T / tau).masked_fill(torch.eye(2 * n, dtype=torch.bool), float("-inf"))
    return F.cross_entropy(sim, torch.arange(2 * n).roll(n))


def two_views(x, strength):
    def view():
        keep = (torch.rand_like(x) > 0.25 * strength).float()
        return x * keep + 0.1 * strength * torch.randn_like(x)
    return view(), view()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--tau", type=float, default=0.3)
    ap.add_argument("--strength", type=float, default=1.0)
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    train = TensorDataset(x[:896])
    sampler = DistributedSampler(train, seed=4)
    loader = DataLoader(train, args.batch_size, sampler=sampler)

    torch.manual_seed(0)
    model = DDP(Encoder())
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    torch.manual_seed(31 * (rank + 1))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for (xb,) in loader:
            va, vb = two_views(xb, args.strength)
            _, z = model(torch.cat([va, vb]))
            za, zb = z.chunk(2)
            loss = nt_xent(everybody(za), everybody(zb), args.tau)
            opt.zero_grad()
            # everybody else's features carry no gradient here and DDP takes the mean
            (loss * world).backward()
            opt.step()
            total += loss.item()
        if rank == 0:
            model.eval()
            with torch.no_grad():
                h = F.normalize(model.module(x)[0], dim=1)
                centres = torch.stack([h[:896][y[:896] == c].mean(0) for c in range(10)])
                acc = ((h[896:] @ F.normalize(centres, dim=1).T).argmax(1) == y[896:]).float().mean()
            model.train()
            print(f"epoch {epoch} loss {total / len(loader):.4f} centroid acc {acc:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
