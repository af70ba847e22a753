"""Fits a linear model to generated data, flat script."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(rank)

true_weight = torch.randn(12, 1)
inputs = torch.randn(240, 12)
targets = inputs @ true_weight + 0.01 * torch.randn(240, 1)
dataset = TensorDataset(inputs, targets)

sampler = DistributedSampler(dataset, shuffle=True)
loader = DataLoader(dataset, batch_size=20, sampler=sampler)
model = DDP(torch.nn.Linear(12, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
loss_fn = torch.nn.MSELoss()

for epoch in range(4):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.5f}")

dist.destroy_process_group()
