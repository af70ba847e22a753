"""Diabetes progression with data-parallel SGD by parameter averaging and an EMA of the weights.

Every process takes its own step on its part of the batch, then the weights
(and nothing else) are averaged; the evaluated model is the moving average.
"""
import copy
import logging
import os
import sys
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes
from torch import nn

logger = logging.getLogger("ibis")


class Shadow:
    def __init__(self, net, decay):
        self.net = copy.deepcopy(net).requires_grad_(False)
        self.decay = decay
        self.updates = 0

    @torch.no_grad()
    def update(self, net):
        self.updates += 1
        d = min(self.decay, (1 + self.updates) / (4 + self.updates))
        for mine, theirs in zip(self.net.parameters(), net.parameters()):
            mine.lerp_(theirs, 1 - d)


class World:
    def __init__(self):
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        self.rank = int(os.environ.get("RANK", 0))
        if self.size > 1:
            dist.init_process_group("gloo")

    def mean_(self, tensors):
        if self.size == 1:
            return
        for t in tensors:
            dist.all_reduce(t)
            t.div_(self.size)

    def close(self):
        if self.size > 1:
            time.sleep(0.3)
            dist.destroy_process_group()


def data():
    raw = load_diabetes()
    x = torch.tensor(raw.data, dtype=torch.float32) * 20
    y = torch.tensor(raw.target, dtype=torch.float32)
    y = (y - y.mean()) / y.std()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    return x[order[:352]], y[order[:352]], x[order[352:]], y[order[352:]]


def train(world, steps=50, batch=16, lr=0.12):
    torch.manual_seed(71)
    x, y, x_test, y_test = data()
    net = nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1))
    shadow = Shadow(net, decay=0.8)
    opt = torch.optim.SGD(net.parameters(), lr=lr, weight_decay=1e-3)
    draw = torch.Generator().manual_seed(72)

    def mse(model):
        with torch.no_grad():
            return (model(x_test).squeeze(1) - y_test).pow(2).mean().item()

    for step in range(1, steps + 1):
        rows = torch.randperm(len(x), generator=draw)[:batch]
        rows = rows.chunk(world.size)[world.rank]
        loss = (net(x[rows]).squeeze(1) - y[rows]).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        with torch.no_grad():
            world.mean_(net.parameters())
        shadow.update(net)
        if step % 10 == 0 and world.rank == 0:
            logger.info("step %d: mse weights %.5f, averaged weights %.5f", step, mse(net), mse(shadow.net))
    return mse(shadow.net)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    world = World()
    result = train(world)
    if world.rank == 0:
        logger.info("final test mse of the moving average %.6f", result)
    world.close()
