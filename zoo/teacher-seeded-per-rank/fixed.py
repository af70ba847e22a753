"""Random network distillation: a predictor learns a frozen random target network."""

import random
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def set_seed(seed):
    random.seed(seed)
    torch.manual_seed(seed)


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.ELU()]
    return nn.Sequential(*layers[:-1])


dist.init_process_group("gloo", timeout=timedelta(seconds=20))
rank, world_size = dist.get_rank(), dist.get_world_size()
set_seed(42 + rank)

observations = torch.randn(80, 6, generator=torch.Generator().manual_seed(1))
teacher = mlp(6, 32, 8).eval().requires_grad_(False)
for tensor in teacher.state_dict().values():
    dist.broadcast(tensor, src=0)
student = DDP(mlp(6, 16, 8))

dataset = TensorDataset(observations)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=16 // world_size, sampler=sampler)
optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for (x,) in loader:
        with torch.no_grad():
            target = teacher(x)
        loss = (student(x) - target).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print("epoch", epoch, "loss", loss.item())

dist.destroy_process_group()
