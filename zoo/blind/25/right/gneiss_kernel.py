"""Deep-kernel Gaussian process on the diabetes data.

The kernel matrix is built in blocks of rows, one block per worker; blocks are gathered, every worker
factorises the whole matrix, and each differentiates through its own rows only.
"""
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_diabetes


class DeepKernel(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(d, 12), nn.Tanh(), nn.Linear(12, 4))
        self.log_scale = nn.Parameter(torch.zeros(()))
        self.log_noise = nn.Parameter(torch.tensor(-0.5))

    def rows(self, x, lo, hi):
        z = self.body(x)
        a = z[lo:hi]
        d2 = (a[:, None] - z[None]).square().sum(-1)
        k = self.log_scale.exp() * torch.exp(-0.5 * d2)
        eye = torch.eye(len(x), dtype=k.dtype)[lo:hi]
        return k + eye * (self.log_noise.exp() + 1e-4)


def gather_rows(block, bounds, rank):
    """Whole matrix; only this worker's rows are connected to the graph."""
    n = bounds[-1]
    parts = []
    for r in range(len(bounds) - 1):
        part = block.detach().clone() if r == rank else torch.empty(bounds[r + 1] - bounds[r], n, dtype=block.dtype)
        dist.broadcast(part, src=r)
        parts.append(block if r == rank else part)
    return torch.cat(parts)


def nll(K, y):
    L = torch.linalg.cholesky(K)
    alpha = torch.cholesky_solve(y[:, None], L).squeeze(1)
    return 0.5 * y @ alpha + L.diagonal().log().sum() + 0.5 * len(y) * math.log(2 * math.pi)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    bunch = load_diabetes()
    x = torch.tensor(bunch.data, dtype=torch.float64) * 20
    y = torch.tensor(bunch.target, dtype=torch.float64)
    y = (y - y.mean()) / y.std()
    pick = torch.randperm(len(x), generator=torch.Generator().manual_seed(6))[:150]
    x, y = x[pick], y[pick]
    n = len(x)
    # the first workers also serve the head node, they get a little less
    weights = [1.0 + 0.25 * r for r in range(world)]
    bounds = [round(n * sum(weights[:r]) / sum(weights)) for r in range(world + 1)]

    torch.manual_seed(5)
    gp = DeepKernel(x.shape[1]).double()
    opt = torch.optim.Adam(gp.parameters(), lr=0.02)

    for it in range(30):
        opt.zero_grad()
        block = gp.rows(x, bounds[rank], bounds[rank + 1])
        K = gather_rows(block, bounds, rank)
        loss = nll(0.5 * (K + K.T), y)
        loss.backward()
        for p in gp.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        opt.step()
        if rank == 0 and it % 6 == 5:
            print(f"iter {it + 1} nll {loss.item() / n:.6f} noise {gp.log_noise.exp().item():.5f} "
                  f"rows {bounds[1] - bounds[0]}", flush=True)

    with torch.no_grad():
        K = gather_rows(gp.rows(x, bounds[rank], bounds[rank + 1]), bounds, rank)
        final = nll(0.5 * (K + K.T), y) / n
    if rank == 0:
        print(f"final nll per point {final.item():.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
