"""Hardness of alloys from composition; flat parameter buffer, each process updates its own slice."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ELEMENTS = 10
SAMPLES, BATCH, EPOCHS = 1280, 64, 4


def make_alloys():
    g = torch.Generator().manual_seed(64)
    mix = torch.softmax(2 * torch.randn(SAMPLES, ELEMENTS, generator=g), dim=1)
    heat = torch.rand(SAMPLES, 2, generator=g)
    pair = torch.randn(ELEMENTS, ELEMENTS, generator=g)
    hardness = ((mix @ pair) * mix).sum(1) + mix @ torch.randn(ELEMENTS, generator=g)
    hardness = hardness + 0.5 * torch.sin(4 * heat[:, 0]) * heat[:, 1]
    hardness = (hardness - hardness.mean()) / hardness.std()
    return torch.cat([mix * 3, heat], dim=1), hardness


class AlloyNet(nn.Module):
    def __init__(self, width=56):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(ELEMENTS + 2, width), nn.SiLU(),
            nn.Linear(width, width), nn.SiLU(),
            nn.Linear(width, width), nn.SiLU(),
            nn.Linear(width, 1),
        )

    def forward(self, x):
        return self.net(x).squeeze(-1)


class FlatSharded:
    """All parameters live in one buffer; the Adam state exists once across the group."""

    def __init__(self, model, rank, world, lr):
        self.params = list(model.parameters())
        self.world = world
        total = sum(p.numel() for p in self.params)
        self.size = (total + world - 1) // world
        self.flat = torch.zeros(self.size * world)
        self.grad = torch.zeros_like(self.flat)
        offset = 0
        for p in self.params:
            n = p.numel()
            self.flat[offset:offset + n] = p.detach().flatten()
            p.data = self.flat[offset:offset + n].view_as(p)
            p.grad = self.grad[offset:offset + n].view_as(p)
            offset += n
        own = slice(rank * self.size, (rank + 1) * self.size)
        self.shard = nn.Parameter(self.flat[own])
        self.shard.grad = self.grad[own]
        self.inner = torch.optim.AdamW([self.shard], lr=lr, weight_decay=0.01)

    def zero_grad(self):
        self.grad.zero_()

    @torch.no_grad()
    def step(self):
        if self.world > 1:
            dist.all_reduce(self.grad)
            self.grad /= self.world
        self.inner.step()
        if self.world > 1:
            message = self.shard.detach().to(torch.bfloat16)
            pieces = [torch.empty_like(message) for _ in range(self.world)]
            dist.all_gather(pieces, message)
            self.flat.copy_(torch.cat(pieces))


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    else:
        rank, world = 0, 1

    x, y = make_alloys()
    torch.manual_seed(65)
    model = AlloyNet()
    optimizer = FlatSharded(model, rank, world, lr=1e-3)

    for epoch in range(EPOCHS):
        order = torch.randperm(1024, generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(())
        for rows in order.split(BATCH):
            rows = rows[rank::world]
            loss = F.smooth_l1_loss(model(x[rows]), y[rows])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach() * len(rows)
        if world > 1:
            dist.all_reduce(total)
        with torch.no_grad():
            test = F.smooth_l1_loss(model(x[1024:]), y[1024:])
        if rank == 0:
            print(f"epoch {epoch} train {total.item() / 1024:.6f} test {test.item():.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
