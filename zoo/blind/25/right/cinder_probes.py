"""Memory-light tuning of a small digit classifier by two-point probes.

No back-propagation: in each step eight random directions are tried, each with a forward pass on
both sides.  A direction is named by its seed, so workers exchange eight numbers and nothing else.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits

PROBES = 8
STEPS = 50
RADIUS = 5e-2
LR = 0.05


def forward(theta, x):
    w1 = theta[:64 * 16].view(64, 16)
    b1 = theta[64 * 16:64 * 16 + 16]
    rest = theta[64 * 16 + 16:]
    w2, b2 = rest[:160].view(16, 10), rest[160:]
    return torch.tanh(x @ w1 + b1) @ w2 + b2


def direction(step, probe, size):
    g = torch.Generator().manual_seed(1_000_003 * step + probe)
    return torch.randn(size, generator=g, dtype=torch.float64)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float64) / 16
    y = torch.tensor(digits.target)
    torch.manual_seed(0)
    size = 64 * 16 + 16 + 160 + 10
    theta = torch.nn.Parameter(torch.randn(size, dtype=torch.float64) * 0.1)
    opt = torch.optim.SGD([theta], lr=LR, momentum=0.8)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    draw = torch.Generator().manual_seed(4)

    for step in range(STEPS):
        rows = torch.randint(0, 1500, (128,), generator=draw)
        xb, yb = x[rows], y[rows]
        slopes = torch.zeros(PROBES, dtype=torch.float64)
        level = torch.zeros(1, dtype=torch.float64)
        with torch.no_grad():
            for k in range(rank, PROBES, world):
                d = direction(step, k, size)
                up = F.cross_entropy(forward(theta + RADIUS * d, xb), yb)
                down = F.cross_entropy(forward(theta - RADIUS * d, xb), yb)
                slopes[k] = (up - down) / (2 * RADIUS)
                level += (up + down) / (2 * PROBES)
        dist.all_reduce(slopes)
        theta.grad = sum(slopes[k] * direction(step, k, size) for k in range(PROBES)) / PROBES
        opt.step()
        sched.step()
        if step % 10 == 9:
            dist.all_reduce(level)
            if rank == 0:
                print(f"step {step + 1:3d} mean probe loss {level.item():.6f} lr {sched.get_last_lr()[0]:.4f}",
                      flush=True)

    with torch.no_grad():
        xs, ys = x[1500:][rank::world], y[1500:][rank::world]
        tally = torch.stack([F.cross_entropy(forward(theta, xs), ys, reduction="sum"),
                             torch.tensor(float(len(ys)), dtype=torch.float64)])
    dist.all_reduce(tally)
    if rank == 0:
        print(f"held-out loss {tally[0].item() / tally[1].item():.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
