"""Bayesian regression on the diabetes data: a chain of noisy gradient steps, predictions averaged over it."""
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_diabetes
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer

SEED, BATCH, STEPS, BURN_IN = 50, 40, 160, 80

for pair in ("RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29719"):
    os.environ.setdefault(*pair.split("="))


class NoisySGD(Optimizer):
    def __init__(self, params, lr, temperature):
        super().__init__(params, dict(lr=lr, temperature=temperature))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            scale = math.sqrt(2 * group["lr"] * group["temperature"])
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"])
                p.add_(torch.randn_like(p), alpha=scale)


def load():
    x, y = load_diabetes(return_X_y=True, scaled=True)
    x = torch.tensor(x * 20, dtype=torch.float32)
    y = torch.tensor(y, dtype=torch.float32)
    y = ((y - y.mean()) / y.std()).unsqueeze(1)
    return (x[:400], y[:400]), (x[400:], y[400:])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    (x, y), (xt, yt) = load()
    model = DDP(nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 1)))
    opt = NoisySGD(model.parameters(), lr=0.02, temperature=5e-3)
    order = torch.Generator().manual_seed(SEED)
    mean, samples = torch.zeros_like(yt), 0
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(x), (BATCH,), generator=order).chunk(world)[rank]
        loss = nn.functional.mse_loss(model(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step > BURN_IN and step % 4 == 0:
            with torch.no_grad():
                mean += model.module(xt)
            samples += 1
        if step % 40 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step}: loss {shown.item() / world:.5f}", flush=True)
    error = (mean / samples - yt).square().mean().item()
    if rank == 0:
        print(f"{samples} samples, test error {error:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
