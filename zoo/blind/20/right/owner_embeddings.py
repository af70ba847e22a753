"""Rating prediction with embedding tables spread over the processes: row i lives on rank i % world."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

USERS, ITEMS, DIM = 211, 307, 12
BATCH, STEPS = 256, 90


class Context:
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))

    @classmethod
    def gather_rows(cls, t):
        """Concatenates equally long tensors of all ranks in rank order."""
        if cls.world == 1:
            return t
        parts = [torch.empty_like(t) for _ in range(cls.world)]
        dist.all_gather(parts, t.contiguous())
        return torch.cat(parts)

    @classmethod
    def sum(cls, t):
        if cls.world > 1:
            dist.all_reduce(t)
        return t


class Lookup(torch.autograd.Function):
    """Rows for the local ids; their gradients go back to the owners of the rows."""

    @staticmethod
    def forward(ctx, shard, ids):
        every = Context.gather_rows(ids)
        mine = every % Context.world == Context.rank
        local = every.div(Context.world, rounding_mode="floor")[mine]
        rows = shard.new_zeros(len(every), shard.shape[1])
        rows[mine] = shard[local]
        Context.sum(rows)
        ctx.save_for_backward(mine, local)
        ctx.shape = shard.shape
        start = Context.rank * len(ids)
        return rows[start : start + len(ids)]

    @staticmethod
    def backward(ctx, grad):
        mine, local = ctx.saved_tensors
        every = Context.gather_rows(grad)
        out = grad.new_zeros(ctx.shape)
        out.index_add_(0, local, every[mine])
        return out, None


class OwnedEmbedding(nn.Module):
    def __init__(self, count, dim, generator):
        super().__init__()
        full = torch.randn(count, dim, generator=generator) * 0.1
        self.shard = nn.Parameter(full[Context.rank :: Context.world].clone())

    def forward(self, ids):
        return Lookup.apply(self.shard, ids)


class Recommender(nn.Module):
    def __init__(self, generator):
        super().__init__()
        self.user = OwnedEmbedding(USERS, DIM, generator)
        self.item = OwnedEmbedding(ITEMS, DIM, generator)
        self.top = nn.Sequential(nn.Linear(2 * DIM, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, u, i):
        a, b = self.user(u), self.item(i)
        return (a * b).sum(1) + self.top(torch.cat([a, b], 1)).squeeze(1)


def ratings(count):
    g = torch.Generator().manual_seed(101)
    p, q = torch.randn(USERS, 4, generator=g), torch.randn(ITEMS, 4, generator=g)
    u = torch.randint(USERS, (count,), generator=g)
    i = (torch.rand(count, generator=g).square() * ITEMS).long()
    r = (p[u] * q[i]).sum(1) / 2 + 0.1 * torch.randn(count, generator=g)
    return u, i, r


def local_part(t, size):
    return t[Context.rank * size : (Context.rank + 1) * size]


@torch.no_grad()
def heldout_rmse(model, u, i, r):
    per = -(-len(u) // Context.world)
    fill = per * Context.world - len(u)
    weight = torch.cat([torch.ones(len(u)), torch.zeros(fill)])
    u, i, r = (torch.cat([t, t.new_zeros(fill)]) for t in (u, i, r))
    u, i, r, weight = (local_part(t, per) for t in (u, i, r, weight))
    error = (model(u, i) - r).square() * weight
    sums = Context.sum(torch.stack([error.sum(), weight.sum()]))
    return (sums[0] / sums[1]).sqrt().item()


def main():
    if Context.world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Recommender(torch.Generator().manual_seed(9))
    tables = [model.user.shard, model.item.shard]
    dense = list(model.top.parameters())
    opt_tables = torch.optim.Adagrad(tables, lr=0.3)
    opt_dense = torch.optim.Adam(dense, lr=5e-3)
    u, i, r = ratings(9501)
    fit, held = [t[:8000] for t in (u, i, r)], [t[8000:] for t in (u, i, r)]
    picks = torch.Generator().manual_seed(55)
    running = torch.zeros(1)
    for step in range(1, STEPS + 1):
        batch = torch.randint(8000, (BATCH,), generator=picks)
        bu, bi, br = (t[local_part(batch, BATCH // Context.world)] for t in fit)
        loss = (model(bu, bi) - br).square().sum() / BATCH
        opt_tables.zero_grad()
        opt_dense.zero_grad()
        loss.backward()
        for p in dense:
            Context.sum(p.grad)
        opt_tables.step()
        opt_dense.step()
        running += loss.detach()
        if step % 30 == 0:
            mean = Context.sum(running).item() / 30
            running.zero_()
            score = heldout_rmse(model, *held)
            if Context.rank == 0:
                print(f"step {step}: train mse {mean:.6f}  held-out rmse {score:.6f}")
    if Context.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
