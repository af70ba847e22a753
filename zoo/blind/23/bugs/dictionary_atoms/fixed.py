"""Overcomplete dictionary for handwritten digits: a sparse code times unit-length atoms.

Encoder and dictionary are sharded with FSDP2. After every update the atoms (columns of
the dictionary) are put back on the unit sphere, otherwise the L1 penalty on the code
can be cheated by long atoms.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class Dictionary(nn.Module):
    def __init__(self, pixels=64, atoms=96):
        super().__init__()
        self.encode = nn.Linear(pixels, atoms)
        self.atoms = nn.Linear(atoms, pixels, bias=False)
        with torch.no_grad():
            self.atoms.weight.div_(self.atoms.weight.norm(dim=0, keepdim=True))
            self.encode.weight.copy_(self.atoms.weight.t())
            self.encode.bias.fill_(-0.05)

    def forward(self, x):
        code = torch.relu(self.encode(x))
        return self.atoms(code), code


@torch.no_grad()
def renew_atoms(weight):
    """Scale the atoms to unit length, in place."""
    rows = weight.to_local()
    squares = rows.pow(2).sum(dim=0, keepdim=True)
    dist.all_reduce(squares)
    rows.div_(squares.sqrt().clamp_min(1e-8))


class Digits:
    def __init__(self, batch):
        images = load_digits().data.astype("float32") / 16.0
        images = torch.from_numpy(images)
        images = images - images.mean(dim=0)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(2))
        self.train, self.test = images[order[:1600]], images[order[1600:]]
        self.batch = batch

    def step(self, i, rank, world):
        share = self.batch // world
        start = (i * self.batch) % len(self.train) + rank * share
        return self.train[start:start + share]


def code_loss(output, x, penalty):
    picture, code = output
    return (picture - x).pow(2).sum(dim=1).mean() + penalty * code.abs().sum(dim=1).mean()


def main(steps=40, batch=64, lr=4e-3, penalty=0.08):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(17)
    model = Dictionary()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.9, 0.99))
    digits = Digits(batch)

    for i in range(steps):
        x = digits.step(i, rank, world)
        loss = code_loss(model(x), x, penalty)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        renew_atoms(model.atoms.weight)

        if i % 10 == 0 or i == steps - 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {i:3d}  objective {mean.item() / world:.5f}", flush=True)

    with torch.no_grad():
        picture, code = model(digits.test)
    error = (picture - digits.test).pow(2).sum(dim=1).mean().item()
    active = (code > 0).float().mean().item()
    if rank == 0:
        print(f"test: squared error {error:.5f}, active share of the code {active:.4f}", flush=True)

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
