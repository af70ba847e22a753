"""Estimates the mutual information of two noisy sensors with the Donsker-Varadhan bound over the whole batch."""
import math
import os
import time

import torch
import torch.distributed as dist
from torch import nn

BATCH, STEPS, RHO = 256, 50, 0.85


def sensors(step):
    """The whole batch of a step; made by everybody, it is cheap."""
    g = torch.Generator().manual_seed(5000 + step)
    z = torch.randn(BATCH, 2, generator=g)
    a = z[:, :1]
    b = RHO * a + math.sqrt(1 - RHO ** 2) * z[:, 1:]
    stranger = torch.randperm(BATCH, generator=g)
    return a, b, b[stranger]


class Statistic(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1, bias=False))

    def forward(self, a, b):
        return self.net(torch.cat([a, b], 1)).squeeze(1)


class Group:
    def __init__(self):
        self.on = "RANK" in os.environ
        if self.on:
            dist.init_process_group("gloo")
        self.rank = dist.get_rank() if self.on else 0
        self.size = dist.get_world_size() if self.on else 1

    def reduce(self, t, op=dist.ReduceOp.SUM):
        t = t.detach().clone()
        if self.on:
            dist.all_reduce(t, op=op)
        return t

    def logsumexp(self, t):
        top = self.reduce(t.max(), dist.ReduceOp.MAX)
        return top + self.reduce((t - top).exp().sum()).log()

    def leave(self):
        if self.on:
            time.sleep(0.3)
            dist.destroy_process_group()


def main():
    group = Group()
    torch.manual_seed(2)
    stat = Statistic()
    opt = torch.optim.SGD(stat.parameters(), lr=0.06, momentum=0.9, nesterov=True)
    share = slice(group.rank * BATCH // group.size, (group.rank + 1) * BATCH // group.size)
    smooth = None
    for step in range(STEPS):
        a, b, other = (t[share] for t in sensors(step))
        joint, apart = stat(a, b), stat(a, other)
        whole = group.logsumexp(apart)
        # d log(sum exp t) = sum softmax(t) dt with the softmax over all processes' rows
        weight = (apart.detach() - whole).exp()
        loss = (weight * apart).sum() - joint.sum() / BATCH
        opt.zero_grad()
        loss.backward()
        for p in stat.parameters():
            p.grad = group.reduce(p.grad)
        opt.step()
        bound = group.reduce(joint.sum()).item() / BATCH - (whole.item() - math.log(BATCH))
        smooth = bound if smooth is None else 0.9 * smooth + 0.1 * bound
        if group.rank == 0 and step % 10 == 9:
            print(f"step {step + 1} bound {bound:.6f} smoothed {smooth:.6f} nats", flush=True)
    if group.rank == 0:
        print(f"true information {-0.5 * math.log(1 - RHO ** 2):.5f} nats")
    group.leave()


if __name__ == "__main__":
    main()
