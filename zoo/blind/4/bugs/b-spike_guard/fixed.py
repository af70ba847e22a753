"""Tabular classifier under FSDP2, with a guard that leaves out batches whose loss jumps."""
import argparse
import collections
import statistics
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def table(rows, seed):
    """Sensor readings; now and then a sensor is broken and the row is far out."""
    g = torch.Generator().manual_seed(seed)
    centers = torch.randn(6, 20, generator=g)
    label = torch.randint(6, (rows,), generator=g)
    x = centers[label] + 0.8 * torch.randn(rows, 20, generator=g)
    broken = torch.rand(rows, generator=g) < 0.03
    x[broken] *= 8 * torch.rand(int(broken.sum()), 1, generator=g) + 2
    label[broken] = torch.randint(6, (int(broken.sum()),), generator=g)
    return x, label


class Residual(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class TabNet(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.stem = nn.Linear(20, dim)
        self.layers = nn.ModuleList([Residual(dim) for _ in range(2)])
        self.head = nn.Linear(dim, 6)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class SpikeGuard:
    def __init__(self, factor, window=12, warmup=6):
        self.factor, self.warmup = factor, warmup
        self.history = collections.deque(maxlen=window)
        self.left_out = 0

    def accepts(self, loss):
        value = loss.detach().clone()
        dist.all_reduce(value)
        value /= dist.get_world_size()
        value = value.item()
        if len(self.history) >= self.warmup and value > self.factor * statistics.median(self.history):
            self.left_out += 1
            return False
        self.history.append(value)
        return True


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=50)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--factor", type=float, default=1.5)
    ap.add_argument("--seed", type=int, default=2)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = table(3000, args.seed)

    torch.manual_seed(args.seed)
    model = TabNet()
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr)
    guard = SpikeGuard(args.factor)

    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(args.seed))
    for step in range(args.steps):
        rows = order[step * args.batch:(step + 1) * args.batch][rank::world]
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optim.zero_grad()
        loss.backward()
        if not guard.accepts(loss):
            continue
        optim.step()

    with torch.no_grad():
        test_x, test_y = table(600, args.seed)
        final = F.cross_entropy(model(test_x), test_y)
    if rank == 0:
        print(f"{args.steps} batches, {guard.left_out} left out, final loss {final:.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
