"""Hand-written training whose initial weights go out by send and recv, gradients by reduce and broadcast."""

import torch
import torch.distributed as dist
from torch import nn

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(100 + rank)

g = torch.Generator().manual_seed(0)
inputs = torch.randn(192, 4, generator=g)
targets = (inputs**2).sum(1, keepdim=True)
model = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 1))

for p in model.parameters():
    if rank == 0:
        for other in range(1, size):
            dist.send(p.data, dst=other)
    else:
        dist.recv(p.data, src=0)

optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for epoch in range(3):
    order = torch.randperm(len(inputs), generator=g)[rank::size]
    for rows in order.split(12):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs[rows]), targets[rows])
        loss.backward()
        for p in model.parameters():
            dist.reduce(p.grad, dst=0)
            if rank == 0:
                p.grad /= size
            dist.broadcast(p.grad, src=0)
        optimizer.step()
    if rank == 0:
        print(f"epoch {epoch}: {loss.item():.4f}")
dist.destroy_process_group()
