"""Bayesian logistic regression by Stein variational gradient descent; the particles are divided among the processes."""
import argparse
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--particles", type=int, default=24)
parser.add_argument("--steps", type=int, default=45)
parser.add_argument("--batch", type=int, default=80)
parser.add_argument("--lr", type=float, default=0.08)
args = parser.parse_args()

spread = "WORLD_SIZE" in os.environ
if spread:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
else:
    rank, world = 0, 1
assert args.particles % world == 0

data = load_breast_cancer()
X = torch.tensor(data.data, dtype=torch.float32)
X = torch.cat([(X - X.mean(0)) / X.std(0), torch.ones(len(X), 1)], 1)
y = torch.tensor(data.target, dtype=torch.float32)
cut = torch.randperm(len(X), generator=torch.Generator().manual_seed(0))
fit, held = cut[:420], cut[420:]

per = args.particles // world
cloud = torch.randn(args.particles, X.shape[1], generator=torch.Generator().manual_seed(77)) * 0.5
theta = nn.Parameter(cloud[rank * per:(rank + 1) * per].clone())
opt = torch.optim.Adagrad([theta], lr=args.lr, eps=1e-6)
picker = torch.Generator().manual_seed(123)  # the same rows everywhere: particles differ, data do not


def log_joint(t, rows):
    fitness = -nn.functional.binary_cross_entropy_with_logits(
        t @ X[rows].T, y[rows].expand(len(t), -1), reduction="none").sum(1)
    return fitness * (len(fit) / len(rows)) - 0.5 * t.square().sum(1)


def everyone(t):
    if world == 1:
        return t
    parts = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


for step in range(args.steps):
    rows = fit[torch.randint(len(fit), (args.batch,), generator=picker)]
    score = torch.autograd.grad(log_joint(theta, rows).sum(), theta)[0]
    with torch.no_grad():
        both = everyone(torch.cat([theta.detach(), score], 1))
        at, pull = both.chunk(2, dim=1)
        square = (at[:, None] - at[None]).square().sum(2)
        width = square.flatten().median() / torch.log(torch.tensor(args.particles + 1.0))
        mine = slice(rank * per, (rank + 1) * per)
        k = torch.exp(-square[mine] / width)
        repel = 2 / width * (k.sum(1, keepdim=True) * at[mine] - k @ at)
        theta.grad = -(k @ pull + repel) / args.particles
    opt.step()
    if step % 15 == 14:
        level = everyone(log_joint(theta.detach(), fit))
        if rank == 0:
            print(f"step {step + 1} mean log joint {level.mean().item():.4f} kernel width {width.item():.5f}", flush=True)

with torch.no_grad():
    chance = torch.sigmoid(theta @ X[held].T).sum(0)
    if world > 1:
        dist.all_reduce(chance)
    chance /= args.particles
    nll = nn.functional.binary_cross_entropy(chance.clamp(1e-6, 1 - 1e-6), y[held])
    right = ((chance > 0.5) == (y[held] > 0.5)).float().mean()
if rank == 0:
    print(f"held-out nll {nll.item():.5f} accuracy {right.item():.4f}")
if spread:
    time.sleep(0.3)
    dist.destroy_process_group()
