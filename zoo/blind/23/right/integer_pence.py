"""How late will an invoice be paid?  Gradients are added in whole units of 2^-36, so that the order of adding cannot matter."""
import logging
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

UNITS = float(2 ** 36)


class Books:
    def __init__(self, world):
        self.world, self.buckets, self.largest = world, 0, 0.0


def whole_units(books, bucket):
    """DDP hook: buckets travel as int64."""
    exact = bucket.buffer().double() * UNITS
    units = exact.round().to(torch.int64)
    books.buckets += 1
    books.largest = max(books.largest, exact.abs().max().item() / UNITS)

    def back(fut):
        total = fut.value()[0]
        return (total.double() / (UNITS * books.world)).to(bucket.buffer().dtype)

    return dist.all_reduce(units, async_op=True).get_future().then(back)


def invoices(n, seed):
    g = np.random.default_rng(seed)
    amount, terms, country = g.lognormal(6, 1, n), g.choice([14, 30, 60], n), g.integers(0, 5, n)
    past, weekday, disputed = g.gamma(2, 4, n), g.integers(0, 7, n), g.random(n) < 0.1
    late = (0.7 * past + 0.05 * terms + 9 * disputed + 2 * (country == 3) - 1.5 * np.log(amount) + 0.8 * (weekday > 4)
            + g.normal(0, 2, n))
    x = np.concatenate([np.log(amount)[:, None], terms[:, None] / 30, past[:, None], disputed[:, None],
                        np.eye(5)[country], np.eye(7)[weekday]], 1)
    x = (x - x.mean(0)) / x.std(0)
    return torch.tensor(x, dtype=torch.float32), torch.tensor((late - late.mean()) / late.std(), dtype=torch.float32)


class Model(nn.Module):
    def __init__(self, n_in):
        super().__init__()
        self.deep = nn.Sequential(nn.Linear(n_in, 40), nn.SiLU(), nn.Linear(40, 20), nn.SiLU())
        self.value, self.spread = nn.Linear(20, 1), nn.Linear(20, 1)

    def forward(self, x):
        h = self.deep(x)
        return self.value(h).squeeze(1), nn.functional.softplus(self.spread(h)).squeeze(1) + 0.05


def gaussian_nll(out, y):
    mean, std = out
    return (torch.log(std) + 0.5 * ((y - mean) / std) ** 2).mean()


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(levelname)s %(message)s")
    x, y = invoices(1400, 17)
    batch, steps = 80, 45

    torch.manual_seed(33)
    model = DDP(Model(x.shape[1]), bucket_cap_mb=0.002)
    books = Books(world)
    model.register_comm_hook(books, whole_units)
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3, alpha=0.95, eps=1e-4, momentum=0.5)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.98)

    for step in range(steps):
        lap, k = divmod(step, 1200 // batch)
        order = np.random.default_rng([5, lap]).permutation(1200)
        rows = torch.as_tensor(order[k * batch:(k + 1) * batch].reshape(world, -1)[rank])
        loss = gaussian_nll(model(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 9 == 8:
            shown = loss.detach() / world
            dist.all_reduce(shown)
            logging.info("step %d  nll %.6f  lr %.6f", step + 1, shown.item(), sched.get_last_lr()[0])

    with torch.no_grad():
        mine = torch.arange(1200, 1400).tensor_split(world)[rank]
        mean, std = model.module(x[mine])
        inside = ((y[mine] - mean).abs() < 1.645 * std).sum()
        sums = torch.stack([((y[mine] - mean) ** 2).double().sum(), inside.double()])
    dist.all_reduce(sums)
    print(f"  worker {rank}: {books.buckets} buckets, largest entry {books.largest:.3f}", flush=True)
    logging.info("rmse %.6f  inside the 90%% band %.3f", (sums[0] / 200).sqrt().item(), sums[1].item() / 200)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
