"""Vowels from twelve spectral coefficients: nearest prototypes on a learned map.

Tensor parallel with DTensor: the map is split by columns, the prototypes by rows. Each
process measures the distances to its own prototypes.
"""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

VOWELS = 6
PER_VOWEL = 4
COEFFICIENTS = 12


class PrototypeNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.map = nn.Linear(COEFFICIENTS, width)
        self.prototypes = nn.Parameter(torch.randn(VOWELS * PER_VOWEL, width) * 0.5)
        self.mesh = None

    def parallelize(self, mesh):
        self.mesh = mesh
        columns = ColwiseParallel(output_layouts=Replicate(), use_local_output=False)
        parallelize_module(self, mesh, {"map": columns})
        self.prototypes = nn.Parameter(distribute_tensor(self.prototypes.data, mesh, [Shard(0)]))
        return self

    def forward(self, x):
        point = torch.tanh(self.map(x)).to_local()
        mine = self.prototypes.to_local()
        near = -(point.unsqueeze(1) - mine).pow(2).sum(dim=2)
        near = DTensor.from_local(near, self.mesh, [Shard(1)]).full_tensor()
        return near.view(-1, VOWELS, PER_VOWEL).logsumexp(dim=2)


def speakers(count, seed):
    """Every vowel has two ways of being said."""
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(3).normal(size=(VOWELS, 2, COEFFICIENTS))
    vowel = rng.integers(VOWELS, size=count)
    dialect = rng.integers(2, size=count)
    x = centres[vowel, dialect] + 0.6 * rng.normal(size=(count, COEFFICIENTS))
    return torch.tensor(x, dtype=torch.float32), torch.from_numpy(vowel)


def test(model):
    x, y = speakers(600, seed=62)
    with torch.no_grad():
        logits = model(x)
    return F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()


def train(model, steps=40, batch=48):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9)
    x, y = speakers(steps * batch, seed=61)
    for step in range(steps):
        rows = slice(step * batch, (step + 1) * batch)
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 8 == 0:
            print(f"step {step:3d}   loss {loss.item():.4f}", flush=True)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(28)
    model = PrototypeNet().parallelize(mesh)

    train(model)
    loss, right = test(model)
    if dist.get_rank() == 0:
        print(f"test loss {loss:.4f}   accuracy {right:.3f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
