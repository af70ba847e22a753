"""Logistic regression with L-BFGS; the rows are divided as evenly as they can be."""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer


def standard(a):
    return (a - a.mean(0)) / a.std(0)


def main(outer=45, ridge=1e-2):
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29843")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    raw = load_breast_cancer()
    x, y = standard(raw.data), raw.target.astype(np.float64)
    total = len(y)                                     # 569 rows
    x_mine = torch.tensor(np.array_split(x, world)[rank])
    y_mine = torch.tensor(np.array_split(y, world)[rank])

    weight = torch.zeros(x.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    opt = torch.optim.LBFGS([weight, bias], lr=0.3, max_iter=2, history_size=6)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        opt.zero_grad()
        data_term = F.binary_cross_entropy_with_logits(x_mine @ weight + bias, y_mine, reduction="sum") / total
        data_term.backward()
        value = data_term.detach().clone()
        for t in (weight.grad, bias.grad, value):
            dist.all_reduce(t)
        # the penalty is the same everywhere and is added after the sum
        with torch.no_grad():
            weight.grad.add_(weight, alpha=ridge)
            value += 0.5 * ridge * weight.square().sum()
        return value

    for it in range(outer):
        value = opt.step(closure)
        if rank == 0 and it % 9 == 0:
            print(f"iteration {it} objective {value.item():.8f}")

    with torch.no_grad():
        hits = ((x_mine @ weight + bias > 0) == (y_mine > 0.5)).sum()
    dist.all_reduce(hits)
    if rank == 0:
        print(f"evaluations {calls} accuracy {hits.item() / total:.4f} |w| {weight.norm().item():.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
