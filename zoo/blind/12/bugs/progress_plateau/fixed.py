"""Progression of diabetes: the learning rate is halved whenever the validation error stops falling."""
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import ReduceLROnPlateau


class Trainer:
    batch = 32

    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        d = load_diabetes()
        x = torch.tensor(d.data) * 20
        y = torch.tensor(d.target)
        y = (y - y.mean()) / y.std()
        self.train_x, self.train_y = x[:320], y[:320]
        self.valid_x, self.valid_y = x[320:440], y[320:440]
        torch.manual_seed(0)
        self.net = DDP(nn.Sequential(nn.Linear(10, 24), nn.Tanh(), nn.Linear(24, 1)))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.15, momentum=0.9)
        self.scheduler = ReduceLROnPlateau(self.optimizer, factor=0.5, patience=0)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.train(epoch)
            error = self.validate()
            self.scheduler.step(error)
            self.report(epoch, error)

    def train(self, epoch):
        self.net.train()
        g = torch.Generator()
        g.manual_seed(epoch)
        for rows in torch.randperm(320, generator=g).split(self.batch):
            rows = rows[self.rank::self.world]
            self.optimizer.zero_grad()
            out = self.net(self.train_x[rows]).squeeze(1)
            nn.functional.smooth_l1_loss(out, self.train_y[rows]).backward()
            self.optimizer.step()

    @torch.no_grad()
    def validate(self):
        self.net.eval()
        own = slice(self.rank, None, self.world)
        out = self.net.module(self.valid_x[own]).squeeze(1)
        error = nn.functional.mse_loss(out, self.valid_y[own])
        dist.all_reduce(error)
        return error.item() / self.world

    def report(self, epoch, error):
        if self.rank == 0:
            print(f"{epoch:2d} validation {error:.5f} lr {self.optimizer.param_groups[0]['lr']:.5f}")


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    Trainer(dist.get_rank(), dist.get_world_size()).fit(10)
    time.sleep(0.3)
    dist.destroy_process_group()
