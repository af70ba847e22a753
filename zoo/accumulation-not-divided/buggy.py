"""Trains an autoencoder with four micro-batches per step."""

import argparse
import contextlib

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def get_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--accumulation-steps", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=3)
    return parser.parse_args()


def main():
    args = get_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = TensorDataset(torch.tensor(load_digits().data[:768], dtype=torch.float32) / 16)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 64)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, (x,) in enumerate(loader):
            boundary = (i + 1) % args.accumulation_steps == 0
            with contextlib.ExitStack() as stack:
                if not boundary:
                    stack.enter_context(model.no_sync())
                loss = nn.functional.mse_loss(model(x), x)
                loss.backward()
            if boundary:
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
