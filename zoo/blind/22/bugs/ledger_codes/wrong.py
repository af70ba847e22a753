"""Account code prediction for ledger entries; the AdamW state is split over the processes."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)

MERCHANTS, CODES = 60, 14
ENTRIES, BATCH, EPOCHS = 1536, 96, 3


def make_entries():
    g = torch.Generator().manual_seed(99)
    merchant = torch.randint(0, MERCHANTS, (ENTRIES,), generator=g)
    usual = torch.randint(0, CODES, (MERCHANTS,), generator=g)
    amount = torch.randn(ENTRIES, 4, generator=g)
    shift = (amount[:, 0] > 0.5).long() + 2 * (amount[:, 1] * amount[:, 2] > 0.4).long()
    popular = torch.tensor([0] * 10 + list(range(CODES)))
    code = (usual[merchant] + shift) % CODES
    noise = torch.rand(ENTRIES, generator=g) < 0.25
    code = torch.where(noise, popular[torch.randint(0, len(popular), (ENTRIES,), generator=g)], code)
    return merchant, amount, code


class LedgerNet(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.merchant = nn.Embedding(MERCHANTS, width)
        self.amount = nn.Linear(4, width)
        self.norm = nn.LayerNorm(width)
        self.hidden1 = nn.Linear(width, width)
        self.hidden2 = nn.Linear(width, width)
        self.out = nn.Linear(width, CODES)

    def forward(self, merchant, amount):
        x = self.norm(self.merchant(merchant) + self.amount(amount))
        x = x + F.gelu(self.hidden1(x))
        x = x + F.gelu(self.hidden2(x))
        return self.out(x)


class ShardedAdamW:
    """Each process keeps the optimizer state of one slice of the parameter list."""

    def __init__(self, params, rank, world, **kwargs):
        self.params = list(params)
        self.world = world
        per_rank = len(self.params) // world
        self.slices = [self.params[r * per_rank:(r + 1) * per_rank] for r in range(world)]
        self.inner = torch.optim.AdamW(self.slices[rank], **kwargs)

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p in self.params:
            dist.all_reduce(p.grad)
            p.grad /= self.world
        self.inner.step()
        for owner, owned in enumerate(self.slices):
            for p in owned:
                dist.broadcast(p, src=owner)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    merchant, amount, code = make_entries()
    torch.manual_seed(10)
    model = LedgerNet()
    optimizer = ShardedAdamW(model.parameters(), rank, world, lr=4e-3, weight_decay=0.02)

    for epoch in range(EPOCHS):
        order = torch.randperm(ENTRIES, generator=torch.Generator().manual_seed(epoch))
        stats = torch.zeros(2)
        for rows in order.split(BATCH):
            rows = rows[rank::world]
            logits = model(merchant[rows], amount[rows])
            loss = F.cross_entropy(logits, code[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            stats[0] += loss.detach() * len(rows)
            stats[1] += (logits.argmax(1) == code[rows]).sum()
        dist.all_reduce(stats)
        if rank == 0:
            print(f"epoch {epoch} loss {stats[0] / ENTRIES:.6f} accuracy {stats[1] / ENTRIES:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
