"""Multinomial logistic model with one hidden layer, full-batch L-BFGS with line search; every process holds a slice of the rows."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--outer", type=int, default=12)
    p.add_argument("--max-iter", type=int, default=2)
    p.add_argument("--l2", type=float, default=1e-3)
    return p.parse_args()


def main():
    args = parse()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    d = load_digits()
    x, y = torch.tensor(d.data) / 16, torch.tensor(d.target)
    n = 901
    lo, hi = n * rank // world, n * (rank + 1) // world
    xs, ys = x[lo:hi], y[lo:hi]

    torch.manual_seed(12)
    net = nn.Sequential(nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 10))
    model = DDP(net)
    opt = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=args.max_iter, history_size=8, line_search_fn="strong_wolfe")
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        opt.zero_grad()
        # slices have different lengths: each row has weight world / n under the mean over processes
        data = F.cross_entropy(model(xs), ys, reduction="sum") * world / n
        penalty = 0.5 * args.l2 * sum(p.square().sum() for p in net.parameters())
        loss = data + penalty
        loss.backward()
        value = loss.detach().clone()
        dist.all_reduce(value)  # the line search must see one value everywhere
        return value / world

    for it in range(args.outer):
        value = opt.step(closure)
        if rank == 0:
            gmax = max(p.grad.abs().max().item() for p in net.parameters())
            print(f"iter {it:2d} objective {value.item():.6f} max|grad| {gmax:.2e} closure calls {calls}", flush=True)

    with torch.no_grad():
        right = (net(x[n + rank::world]).argmax(1) == y[n + rank::world]).sum()
    dist.all_reduce(right)
    if rank == 0:
        print(f"held-out accuracy {right.item() / (len(x) - n):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
