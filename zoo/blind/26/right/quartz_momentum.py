"""Tumour classifier. Every worker takes its own momentum step, then the weights are averaged, after each step."""
import logging
import os
import sys
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import nn

log = logging.getLogger("tumour")


class Worker:
    def __init__(self):
        self.distributed = "RANK" in os.environ
        if self.distributed:
            dist.init_process_group("gloo")
        self.rank = dist.get_rank() if self.distributed else 0
        self.size = dist.get_world_size() if self.distributed else 1
        bunch = load_breast_cancer()
        x = torch.as_tensor(bunch.data, dtype=torch.float32)
        x = (x - x.mean(0)) / x.std(0)
        y = torch.as_tensor(bunch.target, dtype=torch.float32)
        perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(4))
        self.train, self.held = perm[:448], perm[448:]
        self.x, self.y = x, y
        torch.manual_seed(17)
        self.net = nn.Sequential(nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 10), nn.Tanh(), nn.Linear(10, 1))
        # plain momentum is linear in the gradient: the mean of the workers' velocities is the velocity of the mean
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.15, momentum=0.85, weight_decay=5e-4)
        self.sched = torch.optim.lr_scheduler.MultiStepLR(self.opt, [20, 34], gamma=0.4)

    def average_weights(self):
        if not self.distributed:
            return
        flat = nn.utils.parameters_to_vector(self.net.parameters()).detach()
        dist.all_reduce(flat)
        nn.utils.vector_to_parameters(flat / self.size, self.net.parameters())

    def velocity_spread(self):
        """How unlike the velocities of the workers are: only to look at."""
        return sum(self.opt.state[p]["momentum_buffer"].square().sum().item() for p in self.net.parameters()) ** 0.5

    def fit(self, epochs=6, batch=64):
        step = 0
        for epoch in range(epochs):
            order = self.train[torch.randperm(448, generator=torch.Generator().manual_seed(60 + epoch))]
            for b in range(448 // batch):
                rows = order[b * batch:(b + 1) * batch][self.rank::self.size]
                self.opt.zero_grad()
                loss = nn.functional.binary_cross_entropy_with_logits(self.net(self.x[rows]).squeeze(1), self.y[rows])
                loss.backward()
                self.opt.step()
                self.average_weights()
                self.sched.step()
                step += 1
            log.debug("worker %d: own velocity %.4f", self.rank, self.velocity_spread())
            score, bce = self.evaluate()
            if self.rank == 0:
                log.info("epoch %d  steps %d  held-out bce %.6f  accuracy %.4f", epoch + 1, step, bce, score)

    @torch.no_grad()
    def evaluate(self):
        rows = self.held[self.rank::self.size]
        logit = self.net(self.x[rows]).squeeze(1)
        sums = torch.stack([((logit > 0) == (self.y[rows] > 0.5)).float().sum(),
                            nn.functional.binary_cross_entropy_with_logits(logit, self.y[rows], reduction="sum")])
        if self.distributed:
            dist.all_reduce(sums)
        return (sums / len(self.held)).tolist()

    def close(self):
        if self.distributed:
            time.sleep(0.3)
            dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(level=os.environ.get("LOGLEVEL", "INFO"), format="%(message)s", stream=sys.stdout)
    w = Worker()
    w.fit()
    w.close()
