"""Length of stay from admission records, one pass over a year of hospital wards.

The records arrive in pages of eight rows. Most steps hold four pages; towards the
end of the year half of the wards have closed and a step holds two. A process whose
wards are all closed has nothing left to read and leaves the loop before the others.

    torchrun --nproc-per-node=2 stay.py --lr 0.05
"""
import argparse
import logging
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

PAGE = 8
PAGES_PER_STEP = 4
FIELDS = 10

log = logging.getLogger("stay")


class StayModel(nn.Module):
    def __init__(self, fields=FIELDS, width=32):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Linear(fields, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.days = nn.Linear(width, 1)

    def forward(self, x):
        return self.days(self.inner(x)).squeeze(-1)


def records(n, seed):
    """Synthetic admissions: age, scores, laboratory values -> days in hospital."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, FIELDS))
    days = 3.0 + 1.5 * x[:, 0] + np.abs(x[:, 1] * x[:, 2]) - x[:, 3]
    days = days + 0.3 * rng.standard_t(4, size=n)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(days, dtype=torch.float32)


def year_plan(busy_steps, quiet_steps):
    """Number of pages in every step of the year."""
    return [PAGES_PER_STEP] * busy_steps + [PAGES_PER_STEP // 2] * quiet_steps


def pages_of(count, rank, world):
    """Pages of a step that this process reads: wards are handed out in blocks."""
    return [j for j in range(count) if j * world // PAGES_PER_STEP == rank]


def evaluate(model):
    x, y = records(512, seed=99)
    with torch.no_grad():
        return (model(x) - y).abs().mean().item()


def train(args, rank, world):
    torch.manual_seed(args.seed)
    model = DDP(StayModel())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.8)

    plan = year_plan(args.busy, args.quiet)
    x, y = records(sum(plan) * PAGE, seed=args.seed)
    x, y = x.view(-1, PAGE, FIELDS), y.view(-1, PAGE)

    first = 0
    with model.join(divide_by_initial_world_size=False):
        for step, count in enumerate(plan):
            mine = [first + j for j in pages_of(count, rank, world)]
            first += count
            if not mine:
                break
            bx, by = x[mine].flatten(0, 1), y[mine].flatten()
            stay = model(bx)
            # sum over my rows, mean over all rows of the step
            loss = F.smooth_l1_loss(stay, by, reduction="sum")
            loss = loss * world / (count * PAGE)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if rank == 0 and step % 6 == 0:
                log.info("step %2d pages %d (of %d) loss here %.4f",
                         step, len(mine), count, loss.item() * count / world / len(mine))
    return model.module


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.04)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--busy", type=int, default=22)
    parser.add_argument("--quiet", type=int, default=8)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    model = train(args, rank, world)
    if rank == 0:
        log.info("mean absolute error on held-out wards: %.4f days", evaluate(model))

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
