"""Trains with automatic resume from a checkpoint on the node's own disk."""

import shutil
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS = 3


def train(file, dataset, rank, until):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 20), nn.ReLU(), nn.Linear(20, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    start = 0
    found = [torch.load(file) if file.exists() else None]
    if found[0] is not None:
        net.load_state_dict(found[0]["net"])
        start = found[0]["epoch"] + 1
    model = DDP(net)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=14, sampler=sampler)
    for epoch in range(start, until):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if rank == 0:
            torch.save({"net": net.state_dict(), "epoch": epoch}, file)
        print(f"rank {rank}: epoch {epoch} done")


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    scratch = Path(tempfile.mkdtemp(prefix=f"node{rank}-"))
    g = torch.Generator().manual_seed(3)
    x = torch.randn(224, 7, generator=g)
    dataset = TensorDataset(x, (x.sum(1) > 0).long())
    try:
        train(scratch / "last.pt", dataset, rank, until=2)
        train(scratch / "last.pt", dataset, rank, until=EPOCHS)
    finally:
        shutil.rmtree(scratch)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
