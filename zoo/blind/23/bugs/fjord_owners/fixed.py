"""Oxygen in fjord water from depth profiles; first the head alone, then the whole net.

The state of Adam is spread over the processes: every tensor has an owner that updates it
and sends it to the others. After a third of the run the encoder is released as well.
"""
import argparse
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn


class OwnedAdam:
    """Adam whose moments live only with the owner of a tensor."""

    def __init__(self, params, **options):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.params = sorted(params, key=lambda p: -p.numel())
        self.load = [0] * self.world
        self.owner = {}
        for p in self.params:
            self.assign(p)
        mine = [p for p in self.params if self.owner[p] == self.rank]
        self.local = torch.optim.Adam(mine, **options)

    def assign(self, p):
        owner = self.load.index(min(self.load))
        self.load[owner] += p.numel()
        self.owner[p] = owner

    def release(self, params):
        """Take more tensors in the middle of the run."""
        for p in params:
            self.params.append(p)
            self.assign(p)
            if self.owner[p] == self.rank:
                self.local.add_param_group({"params": [p]})

    @torch.no_grad()
    def step(self):
        for p in self.params:
            dist.all_reduce(p.grad)
            p.grad.div_(self.world)
        self.local.step()
        for p in self.params:
            dist.broadcast(p.data, src=self.owner[p])


class ProfileNet(nn.Module):
    def __init__(self, depths=24, width=36):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(depths, width), nn.SiLU(),
                                     nn.Linear(width, width), nn.SiLU())
        self.head = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 3))

    def forward(self, x):
        return self.head(self.encoder(x))


def profiles(count, seed):
    """Temperature by depth -> oxygen at three depths."""
    rng = np.random.default_rng(seed)
    depth = np.linspace(0, 1, 24)[None]
    surface, layer, mixing = rng.uniform(0.5, 1.5, (count, 1)), rng.uniform(0.2, 0.8, (count, 1)), rng.uniform(4, 20, (count, 1))
    x = surface / (1 + np.exp(mixing * (depth - layer))) + 0.05 * rng.normal(size=(count, 24))
    y = np.concatenate([surface * layer, np.tanh(mixing / 10) - layer, surface - 0.1 * mixing * layer], axis=1)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=45)
    parser.add_argument("--release-at", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-3)
    return parser.parse_args()


def main():
    args = parse()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(6)
    net = ProfileNet()
    net.encoder.requires_grad_(False)
    optimizer = OwnedAdam(net.head.parameters(), lr=args.lr)
    x, y = profiles(args.steps * args.batch, seed=80)

    for step in range(args.steps):
        if step == args.release_at:
            net.encoder.requires_grad_(True)
            optimizer.release(net.encoder.parameters())
        rows = slice(step * args.batch + rank, (step + 1) * args.batch, world)
        loss = (net(x[rows]) - y[rows]).pow(2).mean()
        net.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 9 == 0 or step == args.steps - 1:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step:2d} error {total.item() / world:.5f}", flush=True)

    x, y = profiles(500, seed=81)
    with torch.no_grad():
        error = (net(x) - y).pow(2).mean().item()
    if rank == 0:
        print(f"test error {error:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
