"""Marsh-bird detector (synthetic audio features) with temperature calibration.

After training, one temperature is fitted on the validation rows by LBFGS
(Guo et al., 2017) and the calibrated test NLL and ECE are reported.
"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def make_split(n, seed):
    g = torch.Generator().manual_seed(seed)
    proto = torch.randn(5, 16, generator=torch.Generator().manual_seed(9))
    y = torch.randint(0, 5, (n,), generator=g)
    x = proto[y] + 1.6 * torch.randn(n, 16, generator=g)
    flip = torch.rand(n, generator=g) < 0.12
    y = torch.where(flip, torch.randint(0, 5, (n,), generator=g), y)
    return x, y


def gather_rows(part, total, rank, world):
    """Rows that were dealt rank::world, back in their first order on every rank."""
    whole = torch.zeros(total, *part.shape[1:], dtype=part.dtype)
    whole[rank::world] = part
    dist.all_reduce(whole)
    return whole


def fit_temperature(logits, labels):
    logits = logits.double()
    log_t = torch.zeros(1, dtype=torch.float64, requires_grad=True)
    opt = torch.optim.LBFGS([log_t], lr=0.5, max_iter=30, line_search_fn="strong_wolfe")

    def closure():
        opt.zero_grad()
        loss = F.cross_entropy(logits / log_t.exp(), labels)
        loss.backward()
        return loss

    opt.step(closure)
    return log_t.detach().exp().float()


def calibration_error(prob, labels, bins=8):
    conf, guess = prob.max(1)
    hit = (guess == labels).float()
    which = (conf * bins).long().clamp_max(bins - 1)
    ece = 0.0
    for b in range(bins):
        inside = which == b
        if inside.any():
            ece += inside.float().mean() * (hit[inside].mean() - conf[inside].mean()).abs()
    return float(ece)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--batch", type=int, default=40)
    ap.add_argument("--lr", type=float, default=0.1)
    args = ap.parse_args()

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(60)
    model = DDP(nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 5)))
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    x, y = make_split(240, seed=1)
    deal = torch.Generator().manual_seed(61)

    for step in range(args.steps):
        rows = torch.randperm(len(x), generator=deal)[:args.batch][rank::world]
        loss = F.cross_entropy(model(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 15 == 14:
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} loss {shown.item():.5f}")

    net = model.module.eval()
    x_val, y_val = make_split(96, seed=2)
    x_test, y_test = make_split(400, seed=3)
    with torch.no_grad():
        val_logits = net(x_val[rank::world])
        test_logits = gather_rows(net(x_test[rank::world]), len(x_test), rank, world)

    temperature = fit_temperature(val_logits, y_val[rank::world])
    prob = (test_logits / temperature).softmax(1)
    nll = F.nll_loss(prob.log(), y_test).item()
    raw = F.cross_entropy(test_logits, y_test).item()
    if rank == 0:
        print(f"temperature {temperature.item():.4f}")
        print(f"test nll {raw:.5f} -> {nll:.5f}, ece {calibration_error(prob, y_test):.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
