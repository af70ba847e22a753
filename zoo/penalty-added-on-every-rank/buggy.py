"""Ridge regression on features of a small net, gradients added up by hand."""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def sync_grads(model):
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    dist.all_reduce(flat, op=dist.ReduceOp.SUM)
    offset = 0
    for p in model.parameters():
        p.grad.copy_(flat[offset : offset + p.numel()].view_as(p))
        offset += p.numel()


def run(rank, size, global_batch=20, l2=0.05):
    torch.manual_seed(1234)
    data = torch.randn(100, 4, generator=torch.Generator().manual_seed(2))
    target = data.prod(1, keepdim=True) + data[:, :1]
    dataset = TensorDataset(data, target)
    sampler = DistributedSampler(dataset, size, rank)
    loader = DataLoader(dataset, global_batch // size, sampler=sampler)
    model = nn.Sequential(nn.Linear(4, 20), nn.GELU(), nn.Linear(20, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.zeros(1)
        for x, y in loader:
            optimizer.zero_grad()
            fit = (model(x) - y).pow(2).sum() / global_batch
            penalty = l2 * sum(p.pow(2).sum() for p in model.parameters())
            loss = fit + penalty
            loss.backward()
            sync_grads(model)
            optimizer.step()
            total += fit.detach()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(loader):.5f}")


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    run(dist.get_rank(), dist.get_world_size())
    dist.destroy_process_group()
