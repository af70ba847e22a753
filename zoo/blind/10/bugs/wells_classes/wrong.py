"""Digits 0 to 7; at the end the accuracy of each class, on test rows that lie class after class."""
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

CLASSES, PER_CLASS, BATCH, STEPS = 8, 40, 64, 60


def split():
    x, y = load_digits(n_class=CLASSES, return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32) / 16
    y = torch.tensor(y)
    test = torch.cat([(y == c).nonzero().squeeze(1)[-PER_CLASS:] for c in range(CLASSES)])
    keep = torch.ones(len(y), dtype=torch.bool)
    keep[test] = False
    return (x[keep], y[keep]), (x[test], y[test])


class Worker:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.train, self.test = split()
        torch.manual_seed(12)
        self.w1 = (torch.randn(64, 40) * 0.15).requires_grad_()
        self.b1 = torch.zeros(40, requires_grad=True)
        self.w2 = (torch.randn(40, CLASSES) * 0.15).requires_grad_()
        self.b2 = torch.zeros(CLASSES, requires_grad=True)
        self.params = [self.w1, self.b1, self.w2, self.b2]
        self.opt = torch.optim.RMSprop(self.params, lr=1e-3)
        self.g = torch.Generator().manual_seed(99)

    def net(self, x):
        return torch.relu(x @ self.w1 + self.b1) @ self.w2 + self.b2

    def step(self):
        x, y = self.train
        rows = torch.randint(len(x), (BATCH,), generator=self.g)[self.rank :: self.world]
        loss = torch.nn.functional.cross_entropy(self.net(x[rows]), y[rows])
        self.opt.zero_grad()
        loss.backward()
        for p in self.params:
            dist.all_reduce(p.grad)
            p.grad /= self.world
        self.opt.step()

    @torch.no_grad()
    def report(self):
        x, y = (t.chunk(self.world)[self.rank] for t in self.test)
        guess = self.net(x).argmax(1)
        counts = {}
        for label, right in zip(y.tolist(), (guess == y).tolist()):
            hit, seen = counts.get(label, (0, 0))
            counts[label] = (hit + right, seen + 1)
        accuracy = {}
        for label in sorted(counts):
            pair = torch.tensor(counts[label], dtype=torch.float64)
            dist.all_reduce(pair)
            accuracy[label] = (pair[0] / pair[1]).item()
        return accuracy


def main():
    env = os.environ
    env.setdefault("RANK", "0")
    env.setdefault("WORLD_SIZE", "1")
    env.setdefault("MASTER_ADDR", "127.0.0.1")
    env.setdefault("MASTER_PORT", "29709")
    dist.init_process_group("gloo")
    worker = Worker()
    for _ in range(STEPS):
        worker.step()
    accuracy = worker.report()
    if worker.rank == 0:
        for label, value in accuracy.items():
            print(f"class {label}: {value:.4f}")
        worst = min(accuracy, key=accuracy.get)
        print(f"mean over classes {sum(accuracy.values()) / len(accuracy):.4f}, worst class {worst}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
