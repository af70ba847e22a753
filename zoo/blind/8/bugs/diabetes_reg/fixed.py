import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_diabetes
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim import Optimizer


class NormalizedMomentum(Optimizer):
    """Momentum on the gradient divided by its overall norm (You et al. style, one scalar for the model)."""

    def __init__(self, params, lr=1e-2, beta=0.9, eps=1e-8):
        super().__init__(params, dict(lr=lr, beta=beta, eps=eps))

    @torch.no_grad()
    def step(self, closure=None):
        square = torch.zeros(())
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    square += p.grad.pow(2).sum()
        dist.all_reduce(square)
        norm = math.sqrt(square.item())
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "buf" not in state:
                    state["buf"] = torch.zeros_like(p)
                state["buf"].mul_(group["beta"]).add_(p.grad / (norm + group["eps"]))
                p.add_(state["buf"], alpha=-group["lr"])


def load():
    x, y = load_diabetes(return_X_y=True)
    x = torch.tensor(x * 20, dtype=torch.float32)
    y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)[:, None]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[:352], y[:352], x[352:], y[352:]


def run(rank, world, epochs=12, batch=32):
    x, y, x_val, y_val = load()
    torch.manual_seed(17)
    model = DDP(nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1)))
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=NormalizedMomentum, lr=0.02)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=epochs)
    share = batch // world
    for epoch in range(epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(())
        for i in range(0, len(x), batch):
            rows = order[i + rank * share:i + (rank + 1) * share]
            loss = nn.functional.mse_loss(model(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        sched.step()
        dist.all_reduce(total)
        with torch.no_grad():
            val = nn.functional.mse_loss(model(x_val), y_val)
        if rank == 0 and epoch % 3 == 2:
            print(f"epoch {epoch + 1} train {total.item() / world / (len(x) // batch):.5f} val {val.item():.5f}")


if __name__ == "__main__":
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29816")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run(dist.get_rank(), dist.get_world_size())
    time.sleep(0.3)
    dist.destroy_process_group()
