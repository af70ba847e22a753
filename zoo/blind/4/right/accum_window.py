"""Tabular regression with several masked targets and long accumulation windows."""
import argparse
import contextlib
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def make_table(n, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 20)).astype(np.float32)
    w = rng.normal(size=(20, 3)).astype(np.float32)
    y = np.tanh(x @ w * 0.3) + 0.1 * rng.normal(size=(n, 3)).astype(np.float32)
    observed = (rng.random((n, 3)) < np.array([0.9, 0.5, 0.25])).astype(np.float32)
    return torch.from_numpy(x), torch.from_numpy(y.astype(np.float32)), torch.from_numpy(observed)


class MicroBatches:
    """Batch sampler: shuffles, cuts into micro-batches, keeps this process's part of each."""

    def __init__(self, n, size, rank, world, seed):
        self.n, self.size, self.rank, self.world, self.seed = n, size, rank, world, seed
        self.epoch = 0

    def __len__(self):
        return -(-self.n // self.size)

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.n, generator=g).tolist()
        for lo in range(0, self.n, self.size):
            yield order[lo:lo + self.size][self.rank::self.world]
        self.epoch += 1


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--rows", type=int, default=1203)
    ap.add_argument("--micro", type=int, default=32)
    ap.add_argument("--window", type=int, default=5)
    ap.add_argument("--epochs", type=int, default=5)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)

    net = nn.Sequential(nn.Linear(20, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3))
    ddp = DistributedDataParallel(net)
    opt = torch.optim.SGD(ddp.parameters(), lr=args.lr, momentum=0.9)
    batches = MicroBatches(args.rows, args.micro, rank, world, seed=11)
    loader = DataLoader(TensorDataset(*make_table(args.rows, 0)), batch_sampler=batches)

    for epoch in range(args.epochs):
        seen = torch.zeros(2)
        window = torch.zeros(2)
        for i, (x, y, m) in enumerate(loader):
            closing = (i + 1) % args.window == 0 or i + 1 == len(loader)
            with contextlib.nullcontext() if closing else ddp.no_sync():
                err = ((ddp(x) - y) ** 2 * m).sum()
                err.backward()
            window += torch.stack([err.detach(), m.sum()])
            if closing:
                dist.all_reduce(window)
                for p in ddp.parameters():
                    p.grad.mul_(world / window[1])
                opt.step()
                opt.zero_grad()
                seen += window
                window = torch.zeros(2)
        if rank == 0:
            print(f"epoch {epoch} mse {seen[0] / seen[1]:.6f} over {int(seen[1])} targets", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
