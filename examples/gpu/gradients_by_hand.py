"""Weights and gradients synchronised by hand over NCCL: broadcast, all_reduce, scatter, gather, a group.

samestep run -n 3 --fake-gpus examples/gpu/gradients_by_hand.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

from data import digits


def main():
    """Takes eight steps, and shows that all ranks hold the same weights."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # the weights of rank 0 are sent to all
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)).to(device)
    for parameter in model.parameters():
        dist.broadcast(parameter.data, src=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = digits().tensors
    for step in range(8):
        x, y = torch.empty(32, 64, device=device), torch.empty(32, dtype=torch.int64, device=device)
        whole = slice(32 * size * step, 32 * size * (step + 1))
        for part, every in ((x, images[whole]), (y, labels[whole])):
            dist.scatter(part, list(every.to(device).chunk(size)) if rank == 0 else None, src=0)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= size
        optimizer.step()
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    every = [torch.empty_like(mine) for _ in range(size)] if rank == 0 else None
    dist.gather(mine, every, dst=0)
    first_two = dist.new_group([0, 1])
    if rank < 2:
        count = torch.ones(1, device=device)
        dist.all_reduce(count, group=first_two)
    if rank == 0:
        same = all(torch.equal(one, mine) for one in every)
        print(f"{size} ranks hold the same {mine.numel():,} weights: {same}; {int(count)} in the group")
    dist.barrier(device_ids=[device.index])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
