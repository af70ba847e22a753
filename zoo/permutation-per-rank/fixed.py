"""A hand-written input pipeline in nanoGPT style: indices, slices, no DataLoader tricks."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

ddp_rank = int(os.environ["RANK"])
ddp_world_size = int(os.environ["WORLD_SIZE"])
batch_size = 32 // ddp_world_size
seed = 1337
max_epochs = 3


class EpochSampler(Sampler):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size // ddp_world_size

    def __iter__(self):
        order = torch.randperm(self.size, generator=shared)
        return iter(order[ddp_rank::ddp_world_size].tolist())


dist.init_process_group(backend="gloo")
torch.manual_seed(seed + ddp_rank)
shared = torch.Generator().manual_seed(seed)
g = torch.Generator().manual_seed(1)
data = torch.randint(0, 20, (320, 9), generator=g)
dataset = TensorDataset(data[:, :8], data[:, 8])
loader = DataLoader(dataset, batch_size=batch_size, sampler=EpochSampler(len(dataset)))

model = DDP(nn.Sequential(nn.Embedding(20, 12), nn.Flatten(), nn.Linear(96, 20)))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95))
for epoch in range(max_epochs):
    for X, Y in loader:
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    if ddp_rank == 0:
        print(f"epoch {epoch}: loss {loss.item():.4f}")
dist.destroy_process_group()
