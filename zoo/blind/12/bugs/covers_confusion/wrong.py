"""Multi-class tabular data; confusion matrix and macro F1 after each epoch."""
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import make_classification
from torch import nn

CLASSES = 5


class ConfusionMatrix:
    def __init__(self):
        self.counts = torch.zeros(CLASSES, CLASSES, dtype=torch.long)

    def add(self, predicted, target):
        flat = target * CLASSES + predicted
        self.counts += torch.bincount(flat, minlength=CLASSES ** 2).view(CLASSES, CLASSES)

    def macro_f1(self):
        c = self.counts.double()
        hit = c.diagonal()
        return (2 * hit / (c.sum(0) + c.sum(1)).clamp(min=1)).mean().item()


class Run:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        x, y = make_classification(1200, 12, n_informative=8, n_classes=CLASSES, weights=[0.4, 0.25, 0.15, 0.1],
                                   class_sep=0.9, random_state=21)
        x, y = torch.tensor(x), torch.tensor(y)
        self.train, self.test = (x[:800], y[:800]), (x[800:], y[800:])
        torch.manual_seed(14)
        self.net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, CLASSES))
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.3, momentum=0.9)

    def shares(self, part, batch, g=None):
        x, y = part
        order = torch.arange(len(x)) if g is None else torch.randperm(len(x), generator=g)
        for rows in order.split(batch):
            rows = rows[self.rank::self.world]
            yield x[rows], y[rows]

    def learn(self, epoch):
        g = torch.Generator().manual_seed(epoch * 7 + 1)
        for x, y in self.shares(self.train, 80, g):
            self.opt.zero_grad()
            nn.functional.cross_entropy(self.net(x), y).backward()
            for p in self.net.parameters():
                dist.all_reduce(p.grad.div_(self.world))
            self.opt.step()

    def judge(self):
        matrix = ConfusionMatrix()
        with torch.no_grad():
            for x, y in self.shares(self.test, 80):
                matrix.add(self.net(x).argmax(1), y)
                dist.all_reduce(matrix.counts)
        return matrix.macro_f1()


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    run = Run()
    for epoch in range(3):
        run.learn(epoch)
        f1 = run.judge()
        if run.rank == 0:
            print(f"epoch {epoch}: macro F1 {f1:.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
