"""Which kiln did a sherd come from? Chemistry of pottery, small MLP, best epoch kept.

The validation sherds are divided among the processes. The weights of the epoch with the
lowest validation loss are kept and used for the test at the end.
"""
import argparse
import copy
import logging
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

KILNS = 5
OXIDES = 9


def sherds(count, seed):
    rng = np.random.default_rng(seed)
    kiln = rng.integers(KILNS, size=count)
    recipe = np.random.default_rng(7).normal(size=(KILNS, OXIDES))
    x = recipe[kiln] + 1.3 * rng.normal(size=(count, OXIDES))
    return torch.tensor(x, dtype=torch.float32), torch.from_numpy(kiln)


class Run:
    def __init__(self, args):
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.args = args
        torch.manual_seed(args.seed)
        self.net = nn.Sequential(nn.Linear(OXIDES, 64), nn.Tanh(), nn.Linear(64, KILNS))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=args.lr, momentum=0.9)
        self.train = sherds(128, seed=1)
        self.valid = sherds(64, seed=17)
        self.test = sherds(512, seed=3)
        self.best = (float("inf"), -1, None)

    def epoch(self, epoch):
        x, y = self.train
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for block in order.split(self.args.batch):
            rows = block[self.rank::self.world]
            loss = F.cross_entropy(self.net(x[rows]), y[rows], reduction="sum") / len(block)
            self.optimizer.zero_grad()
            loss.backward()
            self.sum_gradients()
            self.optimizer.step()

    def sum_gradients(self):
        flat = torch.cat([p.grad.flatten() for p in self.net.parameters()])
        dist.all_reduce(flat)
        parts = flat.split([p.numel() for p in self.net.parameters()])
        for p, g in zip(self.net.parameters(), parts):
            p.grad.copy_(g.view_as(p))

    @torch.no_grad()
    def losses(self, data):
        """Sum of the losses, number of hits and number of rows."""
        x, y = data[0][self.rank::self.world], data[1][self.rank::self.world]
        logits = self.net(x)
        return torch.stack([F.cross_entropy(logits, y, reduction="sum"),
                            (logits.argmax(1) == y).sum(), torch.tensor(float(len(y)))])

    def validate(self, epoch):
        total = self.losses(self.valid)
        dist.all_reduce(total)
        loss = (total[0] / total[2]).item()
        if loss < self.best[0]:
            self.best = (loss, epoch, copy.deepcopy(self.net.state_dict()))
        if self.rank == 0:
            logging.info("epoch %2d  validation %.4f  best %.4f (epoch %d)",
                         epoch, loss, self.best[0], self.best[1])

    def finish(self):
        self.net.load_state_dict(self.best[2])
        total = self.losses(self.test)
        dist.all_reduce(total)
        if self.rank == 0:
            logging.info("test with epoch %d: loss %.4f, accuracy %.3f", self.best[1],
                         (total[0] / total[2]).item(), (total[1] / total[2]).item())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)

    run = Run(args)
    for epoch in range(args.epochs):
        run.epoch(epoch)
        run.validate(epoch)
    run.finish()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
