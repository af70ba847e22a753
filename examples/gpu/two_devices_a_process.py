"""Two processes with two GPUs each: the model lies across both, DistributedDataParallel averages between processes.

samestep run -n 2 --fake-gpus 4 examples/gpu/two_devices_a_process.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from data import digits


class TwoDevices(nn.Module):
    """A model whose halves lie on two GPUs."""

    def __init__(self, first, second):
        super().__init__()
        self.first, self.second = first, second
        self.lower = nn.Linear(64, 64).to(first)
        self.upper = nn.Linear(64, 10).to(second)

    def forward(self, x):
        """Returns logits, on the second GPU."""
        return self.upper(self.lower(x.to(self.first)).relu().to(self.second))


def main():
    """Takes eight steps, and shows that both processes hold the same weights."""
    local_rank = int(os.environ["LOCAL_RANK"])
    first, second = 2 * local_rank, 2 * local_rank + 1
    torch.cuda.set_device(first)
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(TwoDevices(first, second))  # no device_ids: it has several
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = digits().tensors
    for step in range(8):
        mine = slice((step * size + rank) * 32, (step * size + rank + 1) * 32)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images[mine]), labels[mine].to(second))
        loss.backward()
        optimizer.step()
    total = sum(parameter.detach().double().sum().to(first) for parameter in model.parameters())
    totals = [torch.empty_like(total) for _ in range(size)]
    dist.all_gather(totals, total)
    print(
        f"rank {rank} on cuda:{first} and cuda:{second}: same weights as the others: {len({*map(float, totals)}) == 1}"
    )
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
