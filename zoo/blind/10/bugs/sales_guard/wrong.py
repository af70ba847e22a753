"""Regression on noisy sales figures. Some records are garbage, steps that look broken are left out."""
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29704")):
    os.environ.setdefault(name, value)

BATCH = 32
STEPS = 150
FACTOR = 4.0


def make_data(rows=2048, features=12):
    g = torch.Generator().manual_seed(77)
    x = torch.randn(rows, features, generator=g)
    w = torch.randn(features, generator=g)
    y = torch.sin(x @ w) + 0.5 * x[:, 0] + 0.1 * torch.randn(rows, generator=g)
    broken = torch.rand(rows, generator=g) < 0.02
    y[broken] = y[broken] * 12 + 15
    return x, y.unsqueeze(1)


class Guard:
    """Leaves out a step whose loss is far above the running mean."""

    def __init__(self, factor, decay=0.95):
        self.factor, self.decay = factor, decay
        self.mean = None
        self.left_out = 0

    def accepts(self, loss):
        value = loss.item()
        if self.mean is None:
            self.mean = value
        if value > self.factor * self.mean:
            self.left_out += 1
            return False
        self.mean = self.decay * self.mean + (1 - self.decay) * value
        return True


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    x, y = make_data()
    model = DDP(nn.Sequential(nn.Linear(12, 32), nn.SiLU(), nn.Linear(32, 1)))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    guard = Guard(FACTOR)
    order = torch.Generator().manual_seed(9)
    for step in range(STEPS):
        rows = torch.randint(len(x), (BATCH,), generator=order)
        rows = rows.view(world, -1)[rank]
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        if not guard.accepts(loss):
            continue
        opt.step()
        if rank == 0 and step % 30 == 0:
            print(f"{step:4d} running {guard.mean:.4f} left out {guard.left_out}", flush=True)
    with torch.no_grad():
        error = (model.module(x) - y).abs().median().item()
    if rank == 0:
        print(f"median error {error:.5f}, left out {guard.left_out}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
