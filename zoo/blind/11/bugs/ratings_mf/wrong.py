import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29813")

USERS, ITEMS, RANKS = 300, 240, 6
BATCH, STEPS = 64, 160


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, RANKS, sparse=True)
        self.item = nn.Embedding(ITEMS, RANKS, sparse=True)
        nn.init.normal_(self.user.weight, std=0.4)
        nn.init.normal_(self.item.weight, std=0.4)

    def forward(self, u, i):
        return (self.user(u) * self.item(i)).sum(1)


class Ratings:
    """Ratings of a hidden model.  A batch has every user and every item at most once."""

    def __init__(self, seed=3):
        self.gen = torch.Generator().manual_seed(seed)
        self.u = torch.randn(USERS, 3, generator=self.gen)
        self.i = torch.randn(ITEMS, 3, generator=self.gen)

    def batch(self):
        u = torch.randperm(USERS, generator=self.gen)[:BATCH]
        i = torch.randperm(ITEMS, generator=self.gen)[:BATCH]
        noise = 0.1 * torch.randn(BATCH, generator=self.gen)
        return u, i, (self.u[u] * self.i[i]).sum(1) + noise


def average(param, world):
    grad = param.grad.coalesce()
    values = grad.values()
    dist.all_reduce(values)
    param.grad = torch.sparse_coo_tensor(grad.indices(), values / world, grad.shape)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(20)
    net = Factors()
    opt = torch.optim.SGD(net.parameters(), lr=2.0)
    ratings = Ratings()
    error = torch.zeros(())
    for step in range(STEPS):
        u, i, r = ratings.batch()
        u, i, r = u[rank::world], i[rank::world], r[rank::world]
        loss = (net(u, i) - r).square().mean()
        opt.zero_grad()
        loss.backward()
        for p in net.parameters():
            average(p, world)
        opt.step()
        error += loss.detach() / world
        if step % 40 == 39:
            dist.all_reduce(error)
            if rank == 0:
                print(f"{step + 1:4d} batches, squared error {error.item() / 40:.5f}", flush=True)
            error.zero_()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
