"""Film ratings by factorisation with biases; only the rows that were touched travel.

Every worker makes a packet with the numbers and gradients of its touched rows; packets differ in
length.  All packets are added on every worker, then the rows in them get a lazy Adam step.
"""
import os
import time

import torch
import torch.distributed as dist
from torch import nn

USERS, FILMS, DIM, BATCH, STEPS = 300, 200, 8, 64, 50


def ratings(n=4000):
    g = torch.Generator().manual_seed(90)
    u = torch.randint(0, USERS, (n,), generator=g)
    f = (torch.rand(n, generator=g) ** 2 * FILMS).long()
    pu, pf = torch.randn(USERS, 3, generator=g), torch.randn(FILMS, 3, generator=g)
    r = (pu[u] * pf[f]).sum(1) * 0.6 + 0.1 * torch.randn(n, generator=g)
    return u, f, r


class Factors(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(USERS, DIM + 1, sparse=True)
        self.film = nn.Embedding(FILMS, DIM + 1, sparse=True)
        for e in (self.user, self.film):
            nn.init.normal_(e.weight, std=0.3)

    def forward(self, u, f):
        a, b = self.user(u), self.film(f)
        return (a[:, :-1] * b[:, :-1]).sum(1) + a[:, -1] + b[:, -1]


def exchange(weight):
    """Replaces the sparse gradient by the sum over the workers; packets may be empty."""
    if weight.grad is None:
        packet = (torch.empty(0, dtype=torch.long), torch.empty(0, weight.shape[1]))
    else:
        grad = weight.grad.coalesce()
        packet = (grad.indices()[0], grad.values())
    packets = [None] * dist.get_world_size()
    dist.all_gather_object(packets, packet)
    rows = torch.cat([p[0] for p in packets])
    vals = torch.cat([p[1] for p in packets])
    weight.grad = torch.sparse_coo_tensor(rows[None], vals, weight.shape).coalesce()
    return len(packet[0])


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    u, f, r = ratings()
    torch.manual_seed(91)
    model = Factors()
    opt = torch.optim.SparseAdam(model.parameters(), lr=0.02)
    gen = torch.Generator().manual_seed(92)
    sent = 0

    for step in range(STEPS):
        ids = torch.randint(0, 3600, (BATCH,), generator=gen)
        # a user's ratings of a step stay together: worker = user modulo world
        ids = ids[u[ids] % world == rank]
        model.zero_grad()
        loss = torch.zeros(())
        if len(ids):
            loss = (model(u[ids], f[ids]) - r[ids]).square().sum() / BATCH
            loss.backward()
        sent += exchange(model.user.weight) + exchange(model.film.weight)
        opt.step()
        if step % 10 == 9:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step + 1} loss {total.item():.6f} rows sent {sent}", flush=True)

    with torch.no_grad():
        e = (model(u[3600:], f[3600:]) - r[3600:])[rank::world].square().sum()
    dist.all_reduce(e)
    if rank == 0:
        print(f"rmse {(e.item() / 400) ** 0.5:.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
