"""Heating demand of houses, with a foreman and hired hands.

Rank 0 is the only process that can read the meter data and the only one with an optimizer.  In every step it deals out the
rows and the current weights, the hands return gradients of their share, and the foreman makes the update.
"""
import logging
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

log = logging.getLogger("heating")
FEATURES = 9


def open_group():
    if "RANK" in os.environ:
        dist.init_process_group(backend="gloo")
    else:
        dist.init_process_group(backend="gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


def read_meters(n=900, seed=5):
    g = np.random.default_rng(seed)
    area, storeys, glazing, age = g.uniform(40, 220, n), g.integers(1, 4, n), g.uniform(0, .4, n), g.uniform(0, 90, n)
    outside, wind, sun, people, roof = (g.normal(4, 7, n), g.gamma(2, 2, n), g.uniform(0, 6, n), g.integers(1, 7, n),
                                        g.uniform(20, 60, n))
    loss = area * (0.6 + glazing + age / 200) * np.clip(19 - outside, 0, None) / 100
    y = loss * (1 + 0.03 * wind) - 0.8 * sun - 0.3 * people + 0.1 * storeys * roof / 10 + g.normal(0, .5, n)
    x = np.stack([area, storeys, glazing, age, outside, wind, sun, people, roof], 1)
    x = (x - x.mean(0)) / x.std(0)
    y = (y - y.mean()) / y.std()
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


def build():
    return nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


class Foreman:
    def __init__(self, net, batch):
        self.net, self.batch = net, batch
        x, y = read_meters()
        self.table = torch.cat([x, y[:, None]], 1)
        self.train, self.test = self.table[:768], self.table[768:]
        self.opt = torch.optim.AdamW(net.parameters(), lr=6e-3, weight_decay=1e-2)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, max_lr=1.2e-2, total_steps=48)
        self.dice = np.random.default_rng(21)
        self.pile = []

    def deal(self, hands):
        if not self.pile:
            self.pile = list(torch.as_tensor(self.dice.permutation(len(self.train))).split(self.batch))
        rows = self.train[self.pile.pop(0)]
        return [c.contiguous() for c in rows.chunk(hands)]

    def update(self, flat):
        at = 0
        for p in self.net.parameters():
            p.grad = flat[at:at + p.numel()].view_as(p).clone()
            at += p.numel()
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.opt.step()
        self.sched.step()
        return norm.item()

    @torch.no_grad()
    def judge(self):
        x, y = self.test[:, :-1], self.test[:, -1]
        err = self.net(x).squeeze(1) - y
        return (err ** 2).mean().sqrt().item(), 1 - (err ** 2).sum().item() / ((y - y.mean()) ** 2).sum().item()


def main(batch=64, steps=48):
    rank, world = open_group()
    logging.basicConfig(level=logging.INFO, format=f"[{rank}] %(message)s")
    torch.manual_seed(100 + rank)
    net = build()
    foreman = Foreman(net, batch) if rank == 0 else None
    bench = torch.empty(batch // world, FEATURES + 1)

    for step in range(steps):
        weights = nn.utils.parameters_to_vector(net.parameters()).detach()
        dist.broadcast(weights, src=0)
        nn.utils.vector_to_parameters(weights, net.parameters())
        dist.scatter(bench, foreman.deal(world) if foreman else None, src=0)

        x, y = bench[:, :-1], bench[:, -1]
        loss = ((net(x).squeeze(1) - y) ** 2).sum() / batch
        grads = torch.autograd.grad(loss, list(net.parameters()))
        parcel = torch.cat([g.reshape(-1) for g in grads] + [loss.detach().reshape(1)])
        dist.reduce(parcel, dst=0)
        if foreman:
            norm = foreman.update(parcel[:-1])
            if step % 8 == 7:
                log.info("step %d  mse %.6f  norm %.5f  lr %.5f", step + 1, parcel[-1], norm, foreman.sched.get_last_lr()[0])

    weights = nn.utils.parameters_to_vector(net.parameters()).detach()
    dist.broadcast(weights, src=0)
    nn.utils.vector_to_parameters(weights, net.parameters())
    if foreman:
        rmse, r2 = foreman.judge()
        log.info("test rmse %.5f  r2 %.5f", rmse, r2)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
