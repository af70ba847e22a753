"""A committee of eight small regressors (diabetes progression), trained to disagree: negative correlation learning.

Members live on whichever process has room; the only thing that they exchange is the committee's mean prediction.
"""
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes
from torch import nn

MEMBERS, BATCH, EPOCHS, QUARREL = 8, 44, 5, 0.5


class Member(nn.Module):
    def __init__(self, number):
        super().__init__()
        g = torch.Generator().manual_seed(500 + number)
        width = 8 + 2 * (number % 4)
        self.first = nn.Linear(10, width)
        self.last = nn.Linear(width, 1)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=g) * (0.3 if p.dim() > 1 else 0.05))
        self.act = [torch.tanh, nn.functional.silu][number % 2]

    def forward(self, x):
        return self.last(self.act(self.first(x))).squeeze(1)


class Committee(nn.Module):
    def __init__(self, numbers):
        super().__init__()
        self.numbers = list(numbers)
        self.members = nn.ModuleDict({f"m{n}": Member(n) for n in self.numbers})

    def forward(self, x):
        return torch.stack([self.members[f"m{n}"](x) for n in self.numbers])


def mean_vote(votes):
    total = votes.detach().sum(0)
    if dist.is_initialized():
        dist.all_reduce(total)
    return total / MEMBERS


def main():
    rank, world = 0, 1
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()

    x, y = load_diabetes(return_X_y=True)
    x = torch.tensor(x / x.std(0), dtype=torch.float32)
    y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    train, test = mixed[:352], mixed[352:]

    committee = Committee(range(rank, MEMBERS, world))
    opts = {n: torch.optim.Adam(committee.members[f"m{n}"].parameters(), lr=0.01 * (1 + 0.1 * n), eps=1e-6)
            for n in committee.numbers}
    # every member has its own bootstrap: how often it counts each row
    weight = torch.stack([torch.poisson(torch.ones(len(x)), generator=torch.Generator().manual_seed(90 + n))
                          for n in committee.numbers])

    for epoch in range(EPOCHS):
        order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(300 + epoch))]
        for rows in order.split(BATCH):
            votes = committee(x[rows])
            mean = mean_vote(votes)
            own = weight[:, rows] * (votes - y[rows]) ** 2
            apart = (votes - mean) ** 2
            loss = (own - QUARREL * apart).mean(1).sum()
            for o in opts.values():
                o.zero_grad()
            loss.backward()
            for n, o in opts.items():
                nn.utils.clip_grad_norm_(committee.members[f"m{n}"].parameters(), 3.0)
                o.step()
        joint = ((mean - y[rows]) ** 2).mean()
        spread = apart.detach().sum(0).mean().reshape(1)
        if world > 1:
            dist.all_reduce(spread)
        if rank == 0:
            print(f"epoch {epoch}: joint mse {joint.item():.6f}  spread {spread.item() / MEMBERS:.6f}", flush=True)

    with torch.no_grad():
        votes = committee(x[test])
        mean = mean_vote(votes)
    for row, n in zip(votes, committee.numbers):
        print(f"  member {n} at process {rank}: rmse {((row - y[test]) ** 2).mean().sqrt().item():.4f}", flush=True)
    if rank == 0:
        print(f"committee rmse {((mean - y[test]) ** 2).mean().sqrt().item():.6f}", flush=True)
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
