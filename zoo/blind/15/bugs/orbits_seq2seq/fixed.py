"""Forecast of a satellite's track: a recurrent encoder reads 16 points, a decoder gives the next 12.

In training the decoder is fed with the true points (teacher forcing); otherwise with its own last
answer, as it will be when it is used.
"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PAST, FUTURE = 16, 12


def tracks(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(PAST + FUTURE).float()
    speed = 0.15 + 0.2 * torch.rand(n, 1, generator=g)
    phase = 2 * torch.pi * torch.rand(n, 1, generator=g)
    flat = 0.5 + 0.5 * torch.rand(n, 1, generator=g)
    angle = speed * t + phase + 0.3 * torch.sin(speed * t + phase)
    points = torch.stack([torch.cos(angle), flat * torch.sin(angle)], -1)
    points = points + 0.02 * torch.randn(points.shape, generator=g)
    return TensorDataset(points[:, :PAST], points[:, PAST:])


class Forecaster(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.encoder = nn.GRU(2, width, batch_first=True)
        self.decoder = nn.GRUCell(2, width)
        self.out = nn.Linear(width, 2)

    def forward(self, past, future):
        _, h = self.encoder(past)
        h, point, answers = h[0], past[:, -1], []
        for t in range(FUTURE):
            h = self.decoder(point, h)
            answer = point + self.out(h)
            answers.append(answer)
            point = future[:, t] if self.training else answer
        return torch.stack(answers, 1)


def reduce_sum(*values):
    t = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(t)
    return t.tolist()


def run_epoch(net, loader, optimizer=None):
    """One pass over the loader; returns the mean squared distance over all tracks."""
    squares, count = 0.0, 0
    for past, future in loader:
        with torch.set_grad_enabled(optimizer is not None):
            loss = (net(past, future) - future).square().sum(-1).mean()
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
        squares, count = squares + loss.item() * len(past), count + len(past)
    squares, count = reduce_sum(squares, count)
    return squares / count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    args = parser.parse_args()
    for key, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29628").items():
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    train, test = tracks(256, seed=1), tracks(128, seed=2)
    sampler = DistributedSampler(train, seed=7)
    train_loader = DataLoader(train, args.batch // world, sampler=sampler)
    test_loader = DataLoader(test, 64 // world, sampler=DistributedSampler(test, shuffle=False))
    torch.manual_seed(2)
    net = DistributedDataParallel(Forecaster())
    optimizer = torch.optim.Adam(net.parameters(), lr=args.lr)

    started = time.time()
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        net.train()
        fitted = run_epoch(net, train_loader, optimizer)
        net.eval()
        if rank == 0:
            print(f"epoch {epoch} train {fitted:.5f}", flush=True)
        forecast = run_epoch(net, test_loader)
        if rank == 0:
            print(f"epoch {epoch} forecast {forecast:.5f}", flush=True)
    if rank == 0 and time.time() - started > 600:
        print("slow run", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
