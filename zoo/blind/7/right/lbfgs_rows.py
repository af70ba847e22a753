"""Full-batch softmax regression with L-BFGS; every process holds a share of the rows."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
L2 = 1e-3


def total(t):
    if WORLD > 1:
        dist.all_reduce(t)
    return t


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    d = load_digits()
    x = torch.tensor(d.data, dtype=torch.float64) / 16
    y = torch.tensor(d.target)
    rows = 1297
    bounds = [rows * r // WORLD for r in range(WORLD + 1)]
    mine = slice(bounds[RANK], bounds[RANK + 1])
    xs, ys = x[mine], y[mine]

    torch.manual_seed(0)
    model = nn.Linear(64, 10).double()
    params = list(model.parameters())
    opt = torch.optim.LBFGS(params, lr=0.5, max_iter=5, history_size=8)
    calls = 0

    def closure():
        nonlocal calls
        calls += 1
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(xs), ys, reduction="sum") / rows
        loss = loss + 0.5 * L2 * model.weight.square().sum() / WORLD
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in params] + [loss.detach()[None]])
        total(flat)
        at = 0
        for p in params:
            p.grad.copy_(flat[at:at + p.numel()].view_as(p))
            at += p.numel()
        return flat[-1]

    for outer in range(8):
        loss = opt.step(closure)
        if RANK == 0:
            print(f"outer {outer} loss {loss.item():.8f} closure calls {calls}")
    held = range(rows + RANK, len(x), WORLD)
    with torch.no_grad():
        hits = (model(x[held]).argmax(1) == y[held]).sum()
    n = total(torch.stack([hits, torch.tensor(len(held))]))
    if RANK == 0:
        print(f"held out accuracy {n[0].item() / n[1].item():.4f} of {n[1].item()}")
    if WORLD > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
