"""Claim sizes (synthetic, heavy tail) from categories and numbers; half precision on the CPU with a scale chosen per step."""
import argparse
import math
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

CARDINALITIES = (12, 7, 30)


def make_claims(n, seed):
    rng = np.random.default_rng(seed)
    cats = np.stack([rng.integers(0, k, n) for k in CARDINALITIES], 1)
    nums = rng.normal(size=(n, 10)).astype(np.float32)
    effect = [rng.normal(size=k) for k in CARDINALITIES]
    mean = 0.4 * sum(e[c] for e, c in zip(effect, cats.T)) + 0.5 * nums[:, 0] - 0.3 * nums[:, 1] * nums[:, 2]
    size = np.exp(mean + rng.normal(scale=1.0, size=n)).astype(np.float32)
    return torch.tensor(cats), torch.tensor(nums), torch.tensor(size / size.mean())


class ClaimNet(nn.Module):
    def __init__(self, dim=8, hidden=64):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(k, dim) for k in CARDINALITIES)
        self.trunk = nn.Sequential(nn.Linear(dim * len(CARDINALITIES) + 10, hidden), nn.SiLU(),
                                   nn.Linear(hidden, hidden), nn.SiLU())
        self.out = nn.Linear(hidden, 1)

    def forward(self, cats, nums):
        with torch.autocast("cpu", dtype=torch.float16):
            h = torch.cat([t(cats[:, i]) for i, t in enumerate(self.tables)] + [nums], 1)
            h = self.trunk(h)
        return self.out(h.float()).squeeze(1)


def scale_for(loss, wanted=2.0 ** 9):
    """The power of two which brings the loss to about `wanted`, so that small gradients survive in half precision."""
    level = loss.detach().clone()
    dist.all_reduce(level, op=dist.ReduceOp.MAX)
    return 2.0 ** math.floor(math.log2(wanted / max(level.item(), 1e-6)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rows", type=int, default=2048)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--clip", type=float, default=5.0)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    share = args.batch // world

    cats, nums, size = make_claims(args.rows, seed=0)
    torch.manual_seed(1)
    model = DistributedDataParallel(ClaimNet())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    shuffle = torch.Generator().manual_seed(2)

    for epoch in range(args.epochs):
        order = torch.randperm(args.rows, generator=shuffle)
        epoch_loss = 0.0
        for lo in range(0, args.rows - args.batch + 1, args.batch):
            rows = order[lo + rank * share:lo + (rank + 1) * share]
            loss = (model(cats[rows], nums[rows]) - size[rows]).square().mean()
            scale = scale_for(loss)
            opt.zero_grad()
            (loss * scale).backward()
            for p in model.parameters():
                p.grad /= scale
            nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            opt.step()
            epoch_loss += loss.item()
        summary = torch.tensor([epoch_loss])
        dist.all_reduce(summary)
        if rank == 0:
            print(f"epoch {epoch}: mean squared error {summary.item() / world / (args.rows // args.batch):.4f}"
                  f" (last scale {scale:g})")

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
