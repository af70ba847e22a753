"""LAMB with torch's ZeroRedundancyOptimizer; square-root scaling of the rate, consolidated checkpoint."""
import argparse
import math
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            b1, b2 = g["betas"]
            for p in g["params"]:
                if p.grad is None:
                    continue
                s = self.state[p]
                if not s:
                    s["step"] = torch.tensor(0.0)
                    s["m"], s["v"] = torch.zeros_like(p), torch.zeros_like(p)
                s["step"] += 1
                s["m"].lerp_(p.grad, 1 - b1)
                s["v"].mul_(b2).addcmul_(p.grad, p.grad, value=1 - b2)
                t = s["step"].item()
                upd = (s["m"] / (1 - b1 ** t)) / ((s["v"] / (1 - b2 ** t)).sqrt() + g["eps"]) + g["weight_decay"] * p
                w, u = p.norm(), upd.norm()
                trust = torch.where((w > 0) & (u > 0), w / u, torch.ones_like(w)).clamp(max=10)
                p.sub_(g["lr"] * trust * upd)


class SepConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(),
                                  nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 24, 1), nn.SiLU(),
                                  nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.fc = nn.Linear(24 * 16, 10)
        nn.init.zeros_(self.fc.bias)

    def forward(self, x):
        return self.fc(self.body(x))


def main(a):
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16, torch.tensor(y)
    train = TensorDataset(x[:1152], y[:1152])
    sampler = DistributedSampler(train, seed=2)
    loader = DataLoader(train, a.batch_size, sampler=sampler)
    torch.manual_seed(2)
    model = DDP(SepConvNet(), gradient_as_bucket_view=True)
    scale = math.sqrt(a.batch_size * world / 32)
    opt = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=Lamb, lr=a.lr * scale, weight_decay=0.02)
    total = a.epochs * len(loader)
    warm = max(1, total // 6)
    sched = torch.optim.lr_scheduler.SequentialLR(opt, [
        torch.optim.lr_scheduler.LinearLR(opt, 0.2, 1.0, total_iters=warm),
        torch.optim.lr_scheduler.CosineAnnealingLR(opt, total - warm, eta_min=1e-4)], milestones=[warm])
    for epoch in range(a.epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = nn.functional.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        opt.consolidate_state_dict(to=0)
        with torch.no_grad():
            out = model.module(x[1152:][rank::world])
            ok = torch.tensor([(out.argmax(1) == y[1152:][rank::world]).sum(), len(out)])
        dist.all_reduce(ok)
        held = sum(v.numel() for s in opt.optim.state.values() for v in s.values())
        print(f"[rank {rank}] epoch {epoch} lr {sched.get_last_lr()[0]:.5f} local state {held} acc {ok[0] / ok[1]:.4f}", flush=True)
        if rank == 0:
            path = os.path.join(tempfile.gettempdir(), "zero_lamb.pt")
            torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}, path)
    dist.barrier()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--lr", type=float, default=0.01)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(args)
    time.sleep(0.3)
    dist.destroy_process_group()
