"""Gradient accumulation that synchronises every micro-batch: slower, and just as right."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATE = 2

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
x = torch.randn(256, 12)
dataset = TensorDataset(x, x.cumsum(1)[:, -1:].tanh())
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=8, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1)))
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    optimizer.zero_grad()
    for step, (bx, by) in enumerate(loader):
        loss = nn.functional.mse_loss(model(bx), by)
        (loss / ACCUMULATE).backward()
        if step % ACCUMULATE == ACCUMULATE - 1:
            optimizer.step()
            optimizer.zero_grad()
    if rank == 0:
        print(f"epoch {epoch}: {loss.item():.4f}")
dist.destroy_process_group()
