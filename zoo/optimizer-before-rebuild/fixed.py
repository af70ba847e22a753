"""Trains a spectral-normalised regressor on synthetic data."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def with_smooth_activations(net):
    converted = copy.deepcopy(net)
    for index, layer in enumerate(converted):
        if isinstance(layer, nn.ReLU):
            converted[index] = nn.Softplus()
    return converted


dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.rand(256, 6) * 4 - 2
y = torch.sin(x).sum(1, keepdim=True)
dataset = TensorDataset(x, y)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)

net = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1))
net = with_smooth_activations(net)
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
model = DDP(net)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for bx, by in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(bx), by)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
dist.destroy_process_group()
