"""Two-tower recommender: item and user rows live on their owner rank, the dense towers on every rank."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

USERS, ITEMS, DIM, NEG, BATCH, STEPS = 120, 200, 12, 4, 40, 25


class Collect(torch.autograd.Function):
    """Sums the partial lookups of all owners and keeps this rank's rows of the batch."""

    @staticmethod
    def forward(ctx, part, rank, world):
        ctx.world = world
        whole = part.clone()
        if world > 1:
            dist.all_reduce(whole)
        return whole.chunk(world)[rank].clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.world == 1:
            return grad, None, None
        parts = [torch.empty_like(grad) for _ in range(ctx.world)]
        dist.all_gather(parts, grad.contiguous())
        return torch.cat(parts) / ctx.world, None, None


class OwnedTable(nn.Module):
    def __init__(self, rows, rank, world, seed):
        super().__init__()
        full = 0.1 * torch.randn(rows, DIM, generator=torch.Generator().manual_seed(seed))
        self.rank, self.world = rank, world
        self.rows = nn.Parameter(full[rank::world].clone())

    def forward(self, ids):
        mine = ids % self.world == self.rank
        local = torch.where(mine, ids // self.world, 0)
        part = F.embedding(local, self.rows) * mine[..., None]
        return Collect.apply(part, self.rank, self.world)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.user = nn.Sequential(nn.Linear(DIM, 24), nn.ReLU(), nn.Linear(24, DIM))
        self.item = nn.Sequential(nn.Linear(DIM, 24), nn.ReLU(), nn.Linear(24, DIM))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, u, i):
        return self.scale * (self.user(u)[:, None] * self.item(i)).sum(-1)


def average(module, world):
    if world == 1:
        return
    flat = torch.cat([p.grad.flatten() for p in module.parameters()])
    dist.all_reduce(flat)
    flat /= world
    offset = 0
    for p in module.parameters():
        p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
        offset += p.numel()


def clicks(n=1500):
    g = torch.Generator().manual_seed(40)
    u = torch.randint(0, USERS, (n,), generator=g)
    taste = (u * 7) % ITEMS
    i = (taste + torch.randint(0, 15, (n,), generator=g)) % ITEMS
    return u, i


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(9)
    towers = Towers()
    users = OwnedTable(USERS, rank, world, seed=51)
    items = OwnedTable(ITEMS, rank, world, seed=52)
    dense_opt = torch.optim.AdamW(towers.parameters(), lr=3e-3)
    row_opt = torch.optim.Adagrad([users.rows, items.rows], lr=0.08)
    u, i = clicks()

    for step in range(STEPS):
        g = torch.Generator().manual_seed(1000 + step)
        pick = torch.randint(0, len(u), (BATCH,), generator=g)
        negatives = torch.randint(0, ITEMS, (BATCH, NEG), generator=g)
        candidates = torch.cat([i[pick][:, None], negatives], 1)
        logits = towers(users(u[pick]), items(candidates))
        wanted = torch.zeros_like(logits)
        wanted[:, 0] = 1
        loss = F.binary_cross_entropy_with_logits(logits, wanted)
        dense_opt.zero_grad()
        row_opt.zero_grad()
        loss.backward()
        average(towers, world)
        dense_opt.step()
        row_opt.step()
        if step % 6 == 0:
            shown = loss.detach() / world
            if world > 1:
                dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown:.5f}")

    with torch.no_grad():
        g = torch.Generator().manual_seed(5)
        pick = torch.randint(0, len(u), (80,), generator=g)
        others = torch.randint(0, ITEMS, (80, 9), generator=g)
        scores = towers(users(u[pick]), items(torch.cat([i[pick][:, None], others], 1)))
        hits = (scores.argmax(1) == 0).sum()
    if world > 1:
        dist.all_reduce(hits)
        own = sum(p.numel() for p in (users.rows, items.rows))
    else:
        own = users.rows.numel() + items.rows.numel()
    if rank == 0:
        print(f"hit rate {hits.item() / 80:.4f}")
        print(f"table values held by rank 0: {own}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
