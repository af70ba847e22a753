"""Orthogonalised momentum for matrices; every matrix has one owner that keeps its momentum and computes its update."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.optim import Optimizer


def orthogonalise(m, rounds=8):
    x = m / (m.norm() + 1e-7)
    if m.shape[0] > m.shape[1]:
        return orthogonalise(m.T, rounds).T
    for _ in range(rounds):
        a = x @ x.T
        x = 1.5 * x - 0.5 * a @ x
    return x


class OwnedMuon(Optimizer):
    def __init__(self, params, lr=0.03, momentum=0.9, vector_lr=0.02, decay=0.01):
        super().__init__(params, dict(lr=lr, momentum=momentum, vector_lr=vector_lr, decay=decay))
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            flat = torch.cat([p.grad.flatten() for p in group["params"]])
            dist.all_reduce(flat)
            flat /= self.world
            grads = flat.split([p.numel() for p in group["params"]])
            jobs = []
            for i, (p, g) in enumerate(zip(group["params"], grads)):
                g = g.view_as(p)
                if p.ndim != 2:
                    p.sub_(g, alpha=group["vector_lr"])
                    continue
                owner = i % self.world
                update = torch.empty_like(p)
                if owner == self.rank:
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    state["momentum"].mul_(group["momentum"]).add_(g)
                    update.copy_(orthogonalise(g + group["momentum"] * state["momentum"]))
                jobs.append((p, update, dist.broadcast(update, src=owner, async_op=True)))
            for p, update, job in jobs:
                job.wait()
                p.mul_(1 - group["lr"] * group["decay"]).sub_(update, alpha=group["lr"])


class Net(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.first = nn.Linear(64, width)
        self.middle = nn.ModuleList(nn.Linear(width, width, bias=i % 2 == 0) for i in range(3))
        self.last = nn.Linear(width, 10)

    def forward(self, x):
        h = self.first(x).relu()
        for layer in self.middle:
            h = h + layer(h).relu()
        return self.last(h)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=100)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    torch.manual_seed(9)
    net = Net()
    opt = OwnedMuon(net.parameters())
    for epoch in range(args.epochs):
        for group in opt.param_groups:
            group["lr"] = 0.03 * 0.6 ** epoch
        order = torch.randperm(1400, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(args.batch):
            mine = batch[rank::world]
            opt.zero_grad()
            nn.functional.cross_entropy(net(x[mine]), y[mine]).backward()
            opt.step()
        hits = (net(x[1400:][rank::world]).argmax(1) == y[1400:][rank::world]).sum().float()
        dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch}: {int(hits)} of {len(x) - 1400} test digits")
    time.sleep(0.3)
    dist.destroy_process_group()
