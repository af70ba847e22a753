"""Explicit ratings with biased matrix factorisation.

A user's vector never leaves the process that owns the user (user number modulo world); item vectors are shared. A rating
is handled where its user lives, so the processes' parts of a batch are of different length.
"""
import os
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

USERS, ITEMS, DIM, BATCH = 90, 50, 6, 48


def ratings():
    g = torch.Generator().manual_seed(55)
    u, v = torch.randn(USERS, 3, generator=g), torch.randn(ITEMS, 3, generator=g)
    # a few keen users give most ratings
    keen = torch.distributions.Pareto(1.0, 1.2).icdf(torch.rand(USERS, generator=g) * 0.98)
    who = torch.multinomial(keen, 2160, replacement=True, generator=g)
    what = torch.randint(ITEMS, (2160,), generator=g)
    stars = 3 + (u[who] * v[what]).sum(1) * 0.6 + 0.3 * torch.randn(2160, generator=g)
    return who, what, stars.clamp(1, 5)


class OwnUsers(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        every = torch.randn(USERS, DIM + 1, generator=torch.Generator().manual_seed(6)) * 0.2
        self.world = world
        self.table = nn.Parameter(every[rank::world].clone())

    def forward(self, users):
        return self.table[users // self.world]


class Items(nn.Module):
    def __init__(self):
        super().__init__()
        self.vectors = nn.Embedding(ITEMS, DIM)
        self.bias = nn.Embedding(ITEMS, 1)
        self.level = nn.Parameter(torch.tensor(3.0))
        nn.init.normal_(self.vectors.weight, std=0.2)
        nn.init.zeros_(self.bias.weight)

    def forward(self, user_rows, items):
        dot = (user_rows[:, :DIM] * self.vectors(items)).sum(1)
        return self.level + user_rows[:, DIM] + self.bias(items).squeeze(1) + dot


def main():
    multi = os.environ.get("RANK") is not None
    if multi:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if multi else 0
    world = dist.get_world_size() if multi else 1

    def add_up(t):
        if multi:
            dist.all_reduce(t)
        return t

    who, what, stars = ratings()
    torch.manual_seed(14)
    items = Items()
    users = OwnUsers(rank, world)
    opt_users = torch.optim.Adagrad(users.parameters(), lr=0.15, eps=1e-6)
    opt_items = torch.optim.Adam(items.parameters(), lr=0.03, eps=1e-6)
    train = torch.arange(1920)
    handled = empty = 0
    order = train[torch.randperm(1920, generator=torch.Generator().manual_seed(0))]
    for step, block in enumerate(order.split(BATCH)):
        mine = block[who[block] % world == rank]
        handled += len(mine)
        empty += len(mine) == 0
        opt_users.zero_grad()
        opt_items.zero_grad()
        square = torch.zeros(())
        if len(mine):
            square = (items(users(who[mine]), what[mine]) - stars[mine]).square().sum()
            # each own vector is pulled to zero once for each rating, as in the serial program
            (square / BATCH + 0.01 * users(who[mine]).square().sum() / BATCH).backward()
        for p in items.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            add_up(p.grad)
        if users.table.grad is None:
            users.table.grad = torch.zeros_like(users.table)
        opt_users.step()
        opt_items.step()
        if step % 10 == 9:
            loss = add_up(square.detach().clone()).item() / BATCH
            if rank == 0:
                print(f"batch {step + 1:3d} mse {loss:.6f}", flush=True)
    print(f"process {rank}: {handled} ratings of {len(users.table)} users, {empty} batches without any", file=sys.stderr)

    test = torch.arange(1920, 2160)
    mine = test[who[test] % world == rank]
    with torch.no_grad():
        err = (items(users(who[mine]), what[mine]) - stars[mine]).square().sum()
        size = users.table.square().sum()
    err, size = add_up(err), add_up(size)
    if rank == 0:
        print(f"test rmse {(err.item() / 240) ** 0.5:.6f}  norm of user vectors {size.item() ** 0.5:.5f}")
    if multi:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
