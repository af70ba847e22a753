"""Starts its own two processes with torch.multiprocessing, as PyTorch's DDP tutorial does."""

import argparse
import os
import socket

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup(rank, world_size, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = str(port)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def cleanup():
    dist.destroy_process_group()


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))


def demo_basic(rank, world_size, port):
    setup(rank, world_size, port)
    torch.manual_seed(0)
    inputs = torch.randn(200, 10)
    dataset = TensorDataset(inputs, inputs[:, :5].sigmoid())
    sampler = DistributedSampler(dataset, num_replicas=world_size, rank=rank)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler)
    ddp_model = DDP(ToyModel())
    loss_fn = nn.MSELoss()
    optimizer = optim.SGD(ddp_model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, labels in loader:
            optimizer.zero_grad()
            loss = loss_fn(ddp_model(x), labels)
            loss.backward()
            optimizer.step()
        print(f"rank {rank}, epoch {epoch}: {loss.item():.4f}")
    cleanup()


def free_port():
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def run_demo(demo_fn, world_size):
    mp.spawn(demo_fn, args=(world_size, free_port()), nprocs=world_size, join=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--world-size", type=int, default=2)
    run_demo(demo_basic, parser.parse_args().world_size)
