"""Digit classifier on machines that other people use too: a step's work is cut into tickets, and whoever is free claims the
next one from the shared counter.  A slow machine simply claims fewer."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.distributed_c10d import _get_default_store


class Counter:
    """Hands out 0 .. n-1 once to all the processes together."""

    def __init__(self, label, n):
        self.store, self.label, self.n = _get_default_store(), label, n

    def __iter__(self):
        while (ticket := self.store.add(self.label, 1) - 1) < self.n:
            yield ticket


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.conv2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 16)
        self.fc = nn.Linear(256, 10)

    def forward(self, x):
        x = torch.tanh(self.conv1(x))
        x = torch.tanh(self.norm(self.conv2(x)))
        return self.fc(x.flatten(1))


class Shift:
    def __init__(self, steps=40, batch=64, tickets=8):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.steps, self.batch, self.tickets = steps, batch, tickets
        d = load_digits()
        self.x = torch.tensor(d.images / 16.0, dtype=torch.float32)[:, None]
        self.y = torch.tensor(d.target)
        mix = torch.randperm(len(self.x), generator=torch.Generator().manual_seed(14))
        self.train, self.test = mix[:1408], mix[1408:]
        torch.manual_seed(14)
        self.net = Net()
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.claimed = 0

    def rows(self, step):
        lap, k = divmod(step, len(self.train) // self.batch)
        order = self.train[torch.randperm(len(self.train), generator=torch.Generator().manual_seed(400 + lap))]
        return order[k * self.batch:(k + 1) * self.batch].chunk(self.tickets)

    def step(self, step):
        stack = self.rows(step)
        for p in self.net.parameters():
            p.grad = torch.zeros_like(p)
        loss = torch.zeros(1)
        for t in Counter(f"step{step}", self.tickets):
            part = F.cross_entropy(self.net(self.x[stack[t]]), self.y[stack[t]], reduction="sum") / self.batch
            part.backward()
            loss += part.detach()
            self.claimed += 1
        for t in [p.grad for p in self.net.parameters()] + [loss]:
            dist.all_reduce(t)
        self.opt.step()
        return loss.item()

    @torch.no_grad()
    def exam(self):
        out = torch.zeros(3, dtype=torch.float64)
        for part in Counter("exam", 10):
            rows = self.test.tensor_split(10)[part]
            logits = self.net(self.x[rows])
            out += torch.stack([(logits.argmax(1) == self.y[rows]).sum().double(),
                                F.cross_entropy(logits, self.y[rows], reduction="sum").double(),
                                torch.tensor(float(len(rows)), dtype=torch.float64)])
        dist.all_reduce(out)
        return out[0] / out[2], out[1] / out[2]


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    shift = Shift()
    for step in range(shift.steps):
        loss = shift.step(step)
        if shift.rank == 0 and step % 8 == 7:
            print(f"step {step + 1}: loss {loss:.6f}", flush=True)
    right, nll = shift.exam()
    if shift.rank == 0:
        print(f"accuracy {right.item():.4f}  log-loss {nll.item():.6f}", flush=True)
    print(f"  worker {shift.rank} claimed {shift.claimed} tickets of {shift.steps * shift.tickets}", flush=True)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
