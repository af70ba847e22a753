"""Class-incremental digits: start with five classes, add an output layer for every group that arrives."""
import argparse
import time

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Encoder(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 32), nn.GELU())
        self.heads = nn.ModuleList([nn.Linear(32, 5)])

    def forward(self, x):
        h = self.body(x)
        return torch.cat([head(h) for head in self.heads], 1)

    @property
    def classes(self):
        return sum(head.out_features for head in self.heads)

    def widen(self, classes):
        self.heads.append(nn.Linear(32, classes - self.classes))


class Learner:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        digits = load_digits()
        parts = train_test_split(digits.data / 16.0, digits.target, test_size=0.25, random_state=1)
        self.x, self.xt = (torch.tensor(p, dtype=torch.float32) for p in parts[:2])
        self.y, self.yt = (torch.tensor(p) for p in parts[2:])
        self.order = np.random.RandomState(args.seed)
        torch.manual_seed(args.seed)
        self.net = Encoder()
        self.model = DistributedDataParallel(self.net)
        self.opt = self.make_optimizer()

    def make_optimizer(self):
        return torch.optim.SGD(self.net.parameters(), lr=self.args.lr, momentum=0.9, nesterov=True)

    def stage(self, classes, steps):
        if classes > self.net.classes:
            self.net.widen(classes)
            self.opt = self.make_optimizer()
        pool = torch.nonzero(self.y < classes).squeeze(1)
        for step in range(steps):
            picked = pool[torch.from_numpy(self.order.choice(len(pool), self.args.batch, replace=False))]
            rows = picked[self.rank :: self.world]
            loss = nn.functional.cross_entropy(self.model(self.x[rows]), self.y[rows])
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, classes):
        seen = self.yt < classes
        return (self.net(self.xt[seen]).argmax(1) == self.yt[seen]).float().mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--plan", default="5:15,8:15,10:20", help="classes:steps, in order")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    learner = Learner(args)
    for item in args.plan.split(","):
        classes, steps = map(int, item.split(":"))
        loss = learner.stage(classes, steps)
        acc = learner.evaluate(classes)
        if learner.rank == 0:
            print(f"{classes} classes: loss {loss:.4f}, accuracy {acc:.4f}")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
