"""Self-supervised pretraining on the breast cancer table (VIME style).

A random part of each row is replaced with values of other rows; the network restores the row and says which
cells were replaced. Afterwards a linear probe on the codes is fitted.
"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch.nn.parallel import DistributedDataParallel as DDP


class Vime(nn.Module):
    def __init__(self, d, width=48, code=16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(d, width), nn.ReLU(), nn.Linear(width, code))
        self.restore = nn.Linear(code, d)
        self.which = nn.Linear(code, d)

    def forward(self, x):
        z = F.relu(self.encoder(x))
        return self.restore(z), self.which(z)


class Corruptor:
    """Draws which cells of the global batch are replaced and from which rows; keeps this process's part."""

    def __init__(self, table, rate, rank, world, seed):
        self.table, self.rate = table, rate
        self.rank, self.world = rank, world
        self.gen = torch.Generator().manual_seed(seed)

    def __call__(self, batch):
        d = self.table.shape[1]
        mine = batch[self.rank::self.world]
        mask = torch.rand(len(mine), d, generator=self.gen) < self.rate
        donors = torch.randint(len(self.table), (len(mine), d), generator=self.gen)
        clean = self.table[mine]
        swapped = self.table[donors, torch.arange(d)]
        return clean, torch.where(mask, swapped, clean), mask.float()


def probe(code, y, fitted=400):
    a = torch.cat([code, torch.ones(len(code), 1)], 1).double()
    w = torch.linalg.solve(a[:fitted].T @ a[:fitted] + torch.eye(a.shape[1]), a[:fitted].T @ (2.0 * y[:fitted] - 1).double())
    margin = a[fitted:] @ w
    return ((margin > 0) == (y[fitted:] > 0)).float().mean().item(), margin.abs().mean().item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=96)
    ap.add_argument("--steps", type=int, default=48)
    ap.add_argument("--rate", type=float, default=0.3)
    ap.add_argument("--seed", type=int, default=6)
    args = ap.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = load_breast_cancer(return_X_y=True)
    table = torch.tensor(x, dtype=torch.float32)
    table = ((table - table.mean(0)) / table.std(0)).clamp(-4, 4)
    torch.manual_seed(args.seed)
    net = DDP(Vime(table.shape[1]))
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    corrupt = Corruptor(table, args.rate, rank, world, args.seed + 1)
    order = torch.Generator().manual_seed(args.seed + 2)

    for step in range(1, args.steps + 1):
        batch = torch.randperm(len(table), generator=order)[:args.batch]
        clean, noisy, mask = corrupt(batch)
        restored, guess = net(noisy)
        loss = F.mse_loss(restored, clean) + 0.5 * F.binary_cross_entropy_with_logits(guess, mask)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 12 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.5f}", flush=True)

    with torch.no_grad():
        acc, margin = probe(net.module.encoder(table), torch.tensor(y))
    if rank == 0:
        print(f"probe accuracy {acc:.4f} mean margin {margin:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
