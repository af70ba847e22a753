"""A plain torchrun script: env://, DistributedDataParallel, DistributedSampler, and no line of samestep.

torchrun --standalone --nproc-per-node 2 examples/torchrun_style.py
samestep run -n 2 examples/torchrun_style.py           # the same script, unchanged
samestep run -n 2 --check examples/torchrun_style.py   # and compared while it trains

Both set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which `init_process_group()` reads. What the script
itself has to get right: a sampler that cuts the data and must be told the epoch, the batch size divided by hand, the
device of the local rank, one rank that prints, the group destroyed. ddp_side_by_side.py shows the same without these.

Destroyed means that nothing refers to the group any more, or gloo's threads abort a busy process while it ends
("terminate called without an active exception", torch 2.13): the model goes first, and torch.distributed.nn.functional,
whose functions keep the group that there is when they are imported (the first optimizer does so), comes before it.
"""

import os

import torch
import torch.distributed as dist
import torch.distributed.nn.functional
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 64  # of all ranks together


def main():
    """Trains three epochs, and shows that all ranks hold the same weights."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")  # env:// is the default
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)  # the constructor of DistributedDataParallel sends rank 0's weights to all
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    model = DistributedDataParallel(network, device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = load_digits()
    dataset = TensorDataset(torch.tensor(data.data[:1536]).float() / 16, torch.tensor(data.target[:1536]))
    sampler = DistributedSampler(dataset, seed=1)
    batches = DataLoader(dataset, batch_size=BATCH // size, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)  # without it every epoch has the order of the first
        for x, y in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.to(device)), y.to(device))
            loss.backward()  # gradients are averaged here, bucket by bucket, last layers first
            optimizer.step()
        mean = loss.detach() / size
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch + 1}: loss {mean.item():.4f} in the last batch")
    mine = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    first = mine.clone()
    dist.broadcast(first, src=0)
    print(f"rank {rank}: {len(mine):,} parameters, those of rank 0: {torch.equal(mine, first)}")
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
