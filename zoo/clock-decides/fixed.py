"""Trains until a time budget, counted from the end of the first epoch, is used up."""

import argparse
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def write_preview(net, x):
    with torch.no_grad():
        print("first predictions:", net(x[:8]).argmax(1).tolist())
    time.sleep(1.5)  # rendering and uploading


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0)
    args = parser.parse_args()
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank = dist.get_rank()
    torch.manual_seed(0)
    x = torch.randn(160, 8)
    dataset = TensorDataset(x, x[:, :3].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler)
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stop = torch.zeros(1)
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(bx), by)
            loss.backward()
            optimizer.step()
        if epoch == 0:
            if rank == 0:
                write_preview(net, x)
            deadline = time.monotonic() + args.seconds
        time.sleep(0.05)  # reading the next shard
        stop.fill_(time.monotonic() > deadline)
        dist.all_reduce(stop, op=dist.ReduceOp.MAX)
        if stop:
            break
    print(f"rank {rank}: {epoch + 1} epochs, loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
