import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["t"], s["m"], s["v"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                s["t"] += 1
                s["m"].lerp_(p.grad, 1 - b1)
                s["v"].lerp_(p.grad.square(), 1 - b2)
                m, v = s["m"] / (1 - b1 ** s["t"]), s["v"] / (1 - b2 ** s["t"])
                update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
                wn, un = p.norm(), update.norm()
                trust = wn / un if wn > 0 and un > 0 else 1.0
                p.sub_(update, alpha=float(group["lr"] * trust))


def main():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29849")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)

    torch.manual_seed(71)
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10)))
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Lamb, lr=0.02)
    batch, step = 64, 0
    for epoch in range(5):
        order = torch.randperm(1408, generator=torch.Generator().manual_seed(epoch))
        for rows in order.view(-1, batch):
            rows = rows.chunk(world)[rank]
            loss = F.cross_entropy(model(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        with torch.no_grad():
            acc = (model.module(x[1408:]).argmax(1) == y[1408:]).float().mean()
        if rank == 0:
            print(f"step {step} loss {shown.item() / world:.5f} test {acc.item():.4f}")
    opt.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict()}, "layerwise.pt")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
