"""Tumour classifier for a mixed fleet.

The machines in the lab are not equally fast, so each of them takes a share of the global batch that follows its entry in
FLEET.  Gradients are plain sums over samples; the 1/batch sits in the learning rate, and the learning rate follows the
number of samples the whole fleet has seen, not a number of steps.
"""
import argparse
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer

FLEET = [5, 3, 2, 2, 4, 1, 1, 2]  # relative speeds, by rank


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--micro", type=int, default=6)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--peak", type=float, default=0.4)
    ap.add_argument("--seed", type=int, default=11)
    return ap.parse_args()


def quota(batch, world):
    """Cut points of the global batch, proportional to the speeds."""
    speeds = FLEET[:world]
    total, run, cuts = sum(speeds), 0, [0]
    for s in speeds:
        run += s
        cuts.append(batch * run // total)
    return cuts


def lr_at(seen, total, peak, batch):
    warm = 0.15 * total
    if seen < warm:
        f = (seen + batch) / (warm + batch)
    else:
        f = 0.5 * (1 + math.cos(math.pi * (seen - warm) / (total - warm)))
    return peak * f / batch


def main():
    args = parse()
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")

    def total_of(t):
        if world > 1:
            dist.all_reduce(t)
        return t

    x, y = load_breast_cancer(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    y = torch.tensor(y, dtype=torch.float32)
    mix = torch.randperm(len(x), generator=torch.Generator().manual_seed(args.seed))
    train, test = mix[:480], mix[480:]

    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(30, 24), nn.SiLU(), nn.Linear(24, 12), nn.SiLU(), nn.Linear(12, 1))
    opt = torch.optim.SGD(net.parameters(), lr=1.0, momentum=0.9, weight_decay=1e-4 * args.batch)

    cuts = quota(args.batch, world)
    mine = slice(cuts[rank], cuts[rank + 1])
    horizon = args.epochs * len(train)
    seen, my_rows, began = 0, 0, time.time()

    for epoch in range(args.epochs):
        order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(1000 + epoch))]
        for step, batch in enumerate(order.split(args.batch)):
            rows = batch[mine]
            opt.zero_grad(set_to_none=True)
            tally = torch.zeros(2, dtype=torch.float64)
            for part in rows.split(args.micro):
                loss = F.binary_cross_entropy_with_logits(net(x[part]).squeeze(1), y[part], reduction="sum")
                loss.backward()
                tally += torch.tensor([loss.item(), len(part)], dtype=torch.float64)
            flat = torch.cat([p.grad.reshape(-1) for p in net.parameters()])
            total_of(flat)
            total_of(tally)
            at = 0
            for p in net.parameters():
                p.grad.copy_(flat[at:at + p.numel()].view_as(p))
                at += p.numel()
            nn.utils.clip_grad_norm_(net.parameters(), 2.0 * args.batch)
            for group in opt.param_groups:
                group["lr"] = lr_at(seen, horizon, args.peak, args.batch)
            opt.step()
            seen += int(tally[1])
            my_rows += len(rows)
        if rank == 0:
            print(f"epoch {epoch}  seen {seen}  lr {opt.param_groups[0]['lr'] * args.batch:.4f}  "
                  f"loss {tally[0] / tally[1]:.5f}", flush=True)

    print(f"  host {rank}: {my_rows} rows in {time.time() - began:.2f} s", flush=True)
    with torch.no_grad():
        part = test[rank::world]
        logits = net(x[part]).squeeze(1)
        hit = torch.tensor([((logits > 0).float() == y[part]).sum().item(),
                            F.binary_cross_entropy_with_logits(logits, y[part], reduction="sum").item(),
                            len(part)], dtype=torch.float64)
    total_of(hit)
    if rank == 0:
        print(f"test accuracy {hit[0] / hit[2]:.4f}  log-loss {hit[1] / hit[2]:.6f}", flush=True)
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
