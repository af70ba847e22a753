"""Energy-based model of a pinwheel, trained by persistent contrastive divergence.

A memory of 256 Langevin chains goes on from step to step. A process owns the chains
rank, rank + world, ... (in its own memory only) and moves those that are drawn in a
step, however many these are. Gradients are sums over rows and added up by hand.
"""
import os

import torch
import torch.distributed as dist
from torch import nn

CHAINS, BATCH, LANGEVIN, STEPS = 256, 64, 8, 45


def pinwheel(n, arms=5):
    g = torch.Generator().manual_seed(1)
    arm = torch.randint(0, arms, (n,), generator=g)
    r = 1.2 + 0.25 * torch.randn(n, generator=g)
    side = 0.08 * torch.randn(n, generator=g)
    angle = 2 * torch.pi * arm / arms + 0.9 * r
    return torch.stack([r * angle.cos() - side * angle.sin(), r * angle.sin() + side * angle.cos()], 1)


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1, bias=False))

    def forward(self, x):
        return self.net(x)[:, 0] + 0.1 * x.square().sum(1)


class Chains:
    """Position of the own chains, and for how many steps each has been running."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        g = torch.Generator().manual_seed(2)
        start = 4 * torch.rand(CHAINS, 2, generator=g) - 2
        self.place = {c: start[c] for c in range(rank, CHAINS, world)}
        self.age = dict.fromkeys(self.place, 0)

    def advance(self, energy, step):
        g = torch.Generator().manual_seed(1000 + step)
        drawn = torch.randperm(CHAINS, generator=g)[:BATCH]
        fresh = torch.rand(BATCH, generator=g) < 0.05
        restart = 4 * torch.rand(BATCH, 2, generator=g) - 2
        noise = torch.randn(LANGEVIN, BATCH, 2, generator=g)
        own = [i for i, c in enumerate(drawn.tolist()) if c % self.world == self.rank]
        names = [int(drawn[i]) for i in own]
        if not own:
            return torch.empty(0, 2)
        for i, c in zip(own, names):
            if fresh[i]:
                self.place[c], self.age[c] = restart[i], 0
        x = torch.stack([self.place[c] for c in names])
        for k in range(LANGEVIN):
            x.requires_grad_(True)
            slope, = torch.autograd.grad(energy(x).sum(), x)
            x = x.detach() - 0.05 * slope + 0.1 * noise[k, own]
        for c, place in zip(names, x):
            self.place[c] = place
            self.age[c] += LANGEVIN
        return x


def main():
    torch.set_default_dtype(torch.float64)
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")

    def add_up(tensor):
        if world > 1:
            dist.all_reduce(tensor)
        return tensor

    torch.manual_seed(4)
    energy = Energy()
    torch.manual_seed(rank)
    optimizer = torch.optim.Adam(energy.parameters(), lr=0.01, betas=(0.5, 0.99))
    chains, data = Chains(rank, world), pinwheel(1000)
    order = torch.Generator().manual_seed(3)
    for step in range(STEPS):
        real = data[torch.randperm(len(data), generator=order)[:BATCH]].tensor_split(world)[rank]
        fake = chains.advance(energy, step)
        high, low = energy(fake), energy(real)
        loss = ((low.sum() - high.sum()) + 0.05 * (low.square().sum() + high.square().sum())) / BATCH
        optimizer.zero_grad()
        loss.backward()
        flat = add_up(torch.cat([p.grad.flatten() for p in energy.parameters()]))
        used = 0
        for p in energy.parameters():
            p.grad = flat[used:used + p.numel()].view_as(p)
            used += p.numel()
        optimizer.step()
        if step % 9 == 8:
            counts = add_up(torch.tensor([low.sum().item(), high.sum().item(), float(len(fake)), float(sum(chains.age.values()))]))
            if rank == 0:
                print(f"step {step + 1}: energy of data {counts[0] / BATCH:.5f}, of {int(counts[2])} chains "
                      f"{counts[1] / BATCH:.5f}, mean age {counts[3] / CHAINS:.2f}")
    radius = add_up(torch.stack(list(chains.place.values())).norm(dim=1).sum())
    if rank == 0:
        print(f"mean radius of all chains: {radius.item() / CHAINS:.5f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
