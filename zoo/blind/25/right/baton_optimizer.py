"""Digits autoencoder whose Adam moments live on one worker at a time.

The workers take turns: the one that holds the baton receives the summed gradients, updates the
weights and sends them out; then it hands the moments to the next worker.  Memory for the moments
is needed once in the whole job and every worker's processor carries the same share of updates.
"""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits

STEPS, GLOBAL_BATCH, LR = 40, 64, 3e-3
BETA1, BETA2, EPS = 0.9, 0.99, 1e-8


class BatonAdam:
    def __init__(self, params, rank, world):
        self.params = list(params)
        self.rank, self.world = rank, world
        self.t = 0
        self.holder = 0
        self.state = self._empty() if rank == 0 else None

    def _empty(self):
        return [torch.zeros(2, *p.shape) for p in self.params]

    def _reduce_to_holder(self):
        for p in self.params:
            dist.reduce(p.grad, dst=self.holder)

    def _hand_over(self):
        nxt = (self.holder + 1) % self.world
        if nxt != self.holder:
            if self.rank == self.holder:
                for s in self.state:
                    dist.send(s, dst=nxt)
                self.state = None
            elif self.rank == nxt:
                self.state = self._empty()
                for s in self.state:
                    dist.recv(s, src=self.holder)
        self.holder = nxt

    @torch.no_grad()
    def step(self):
        self.t += 1
        self._reduce_to_holder()
        if self.rank == self.holder:
            lr = LR * min(1.0, self.t / 8)
            for p, s in zip(self.params, self.state):
                m, v = s[0], s[1]
                m.mul_(BETA1).add_(p.grad, alpha=1 - BETA1)
                v.mul_(BETA2).addcmul_(p.grad, p.grad, value=1 - BETA2)
                mh = m / (1 - BETA1 ** self.t)
                vh = v / (1 - BETA2 ** self.t)
                p.sub_(lr * mh / (vh.sqrt() + EPS))
        for p in self.params:
            dist.broadcast(p, src=self.holder)
            p.grad = None
        self._hand_over()


def autoencoder():
    return nn.Sequential(
        nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 12),
        nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 64))


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
    train, test = images[:1536], images[1536:]
    torch.manual_seed(21)
    model = autoencoder()
    optimizer = BatonAdam(model.parameters(), rank, world)
    rng = np.random.default_rng(5)

    for step in range(STEPS):
        rows = rng.choice(len(train), GLOBAL_BATCH, replace=False)
        x = train[np.array_split(rows, world)[rank]]
        loss = (model(x) - x).square().sum() / (GLOBAL_BATCH * 64)
        loss.backward()
        optimizer.step()
        if step % 10 == 9:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step + 1} mse {total.item():.6f} baton now at {optimizer.holder}", flush=True)

    with torch.no_grad():
        err = (model(test[rank::world]) - test[rank::world]).square().sum()
    dist.all_reduce(err)
    if rank == 0:
        print(f"test mse {err.item() / test.numel():.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
