"""LARS with flat, evenly sharded optimizer state (each process updates one slice of the parameters)."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class ShardedLARS(torch.optim.Optimizer):
    """Averages gradients, updates the slice that belongs to this rank, then shares the new parameters."""

    def __init__(self, params, lr, momentum=0.9, weight_decay=1e-3, trust=0.02):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.params = [p for g in self.param_groups for p in g["params"]]
        n = sum(p.numel() for p in self.params)
        self.chunk = -(-n // self.world)
        self.padded = self.chunk * self.world
        self.lo, self.hi = self.rank * self.chunk, (self.rank + 1) * self.chunk
        # pieces of tensors that fall into our slice: (index, start, stop) in slice coordinates
        self.pieces, at = [], 0
        for i, p in enumerate(self.params):
            a, b = max(at, self.lo), min(at + p.numel(), self.hi)
            if a < b:
                self.pieces.append((i, a - self.lo, b - self.lo))
            at += p.numel()
        self.momentum_buf = torch.zeros(self.chunk)

    def _flat(self, tensors):
        out = torch.zeros(self.padded)
        torch.cat([t.detach().reshape(-1) for t in tensors], out=out[: sum(t.numel() for t in tensors)])
        return out

    @torch.no_grad()
    def step(self, closure=None):
        group = self.param_groups[0]
        lr, mu, wd, trust = group["lr"], group["momentum"], group["weight_decay"], group["trust"]
        grad = self._flat([p.grad for p in self.params])
        dist.all_reduce(grad)
        grad = grad[self.lo:self.hi] / self.world
        weights = self._flat(self.params)[self.lo:self.hi].clone()

        norms = torch.zeros(len(self.params), 2)
        for i, a, b in self.pieces:
            norms[i, 0] = weights[a:b].pow(2).sum()
            norms[i, 1] = grad[a:b].pow(2).sum()
        norms.sqrt_()

        for i, a, b in self.pieces:
            w, g = weights[a:b], grad[a:b]
            scale = 1.0
            if self.params[i].dim() > 1:
                wn, gn = norms[i]
                scale = trust * wn / (gn + wd * wn + 1e-9)
                g = g + wd * w
            self.momentum_buf[a:b].mul_(mu).add_(g * scale)
            w.sub_(self.momentum_buf[a:b], alpha=lr)

        parts = [torch.empty(self.chunk) for _ in range(self.world)]
        dist.all_gather(parts, weights)
        flat, at = torch.cat(parts), 0
        for p in self.params:
            p.copy_(flat[at: at + p.numel()].view_as(p))
            at += p.numel()


def build(width):
    return nn.Sequential(
        nn.Linear(64, width), nn.LayerNorm(width), nn.ReLU(),
        nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU(),
        nn.Linear(width, 10),
    )


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--global-batch", type=int, default=120)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=0.8)
    ap.add_argument("--width", type=int, default=64)
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    raw = load_digits()
    x = torch.tensor(raw.data, dtype=torch.float32) / 16
    y = torch.tensor(raw.target)
    train = TensorDataset(x[:1440], y[:1440])
    sampler = DistributedSampler(train, shuffle=True, seed=9)
    loader = DataLoader(train, batch_size=args.global_batch // world, sampler=sampler)

    net = build(args.width)
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    opt = ShardedLARS(net.parameters(), lr=args.lr)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for xb, yb in loader:
            loss = F.cross_entropy(net(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        with torch.no_grad():
            acc = (net(x[1440:]).argmax(1) == y[1440:]).float().mean().item()
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / world / len(loader):.4f} test accuracy {acc:.4f}", flush=True)

    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
