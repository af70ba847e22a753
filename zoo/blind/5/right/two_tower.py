"""Two-tower retrieval with in-batch negatives taken from all processes; sparse id tables, dense projections."""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

USERS, ITEMS = 300, 120


class Gather(torch.autograd.Function):
    """Rows of all processes, own rows at offset rank * n; every process's loss sends gradient to its origin."""

    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


class Tower(nn.Module):
    def __init__(self, count, dim=24):
        super().__init__()
        self.table = nn.Embedding(count, dim, sparse=True)
        self.net = nn.Sequential(nn.Linear(dim, 48), nn.GELU(), nn.Linear(48, 16))

    def forward(self, ids):
        return F.normalize(self.net(self.table(ids)), dim=1)


class Retrieval(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = Tower(USERS), Tower(ITEMS)
        self.log_scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, users, items):
        return self.user(users), self.item(items), self.log_scale.exp()


def interactions(n):
    g = torch.Generator().manual_seed(8)
    users = torch.randint(0, USERS, (n,), generator=g)
    items = (users * 7 // 5 + torch.randint(0, 6, (n,), generator=g)) % ITEMS
    return users, items


def contrast(u, v, scale, items, rank):
    all_u, all_v = Gather.apply(u), Gather.apply(v)
    ids = [torch.empty_like(items) for _ in range(dist.get_world_size())]
    dist.all_gather(ids, items)
    ids = torch.cat(ids)
    diagonal = torch.arange(len(items)) + rank * len(items)
    same = items[:, None] == ids[None, :]
    same[torch.arange(len(items)), diagonal] = False
    forth = (scale * u @ all_v.T).masked_fill(same, -1e4)
    back = (scale * v @ all_u.T).masked_fill(same, -1e4)
    return (F.cross_entropy(forth, diagonal) + F.cross_entropy(back, diagonal)) / 2


def recall(model, users, items, rank, world, k=10):
    with torch.no_grad():
        catalogue = model.item(torch.arange(ITEMS))
        mine = torch.arange(len(users))[rank::world]
        top = (model.user(users[mine]) @ catalogue.T).topk(k).indices
        found = torch.tensor([float((top == items[mine, None]).any(1).sum()), float(len(mine))])
    dist.all_reduce(found)
    return (found[0] / found[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--global-batch", type=int, default=96)
    ap.add_argument("--steps", type=int, default=45)
    args = ap.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("MASTER_ADDR", "localhost")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    users, items = interactions(2101)
    torch.manual_seed(1)
    model = DistributedDataParallel(Retrieval())
    tables = [m.weight for m in model.modules() if isinstance(m, nn.Embedding)]
    others = [p for p in model.parameters() if all(p is not t for t in tables)]
    optimizers = [torch.optim.SparseAdam(tables, lr=5e-3), torch.optim.AdamW(others, lr=5e-3)]
    g = torch.Generator().manual_seed(4)
    for step in range(args.steps):
        pick = torch.randint(0, 2000, (args.global_batch,), generator=g).chunk(world)[rank]
        loss = contrast(*model(users[pick], items[pick]), items[pick], rank)
        for o in optimizers:
            o.zero_grad()
        loss.backward()
        for o in optimizers:
            o.step()
        with torch.no_grad():
            model.module.log_scale.clamp_(max=3.0)
        if (step + 1) % 15 == 0:
            r = recall(model.module, users[2000:], items[2000:], rank, world)
            if rank == 0:
                print(f"step {step + 1} own loss {loss.item():.4f} recall@10 {r:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
