"""Denoising autoencoder. Dropout masks and input noise come from each worker's own random stream."""
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

DROP, NOISE = 0.1, 0.15


class Worker:
    def __init__(self):
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        if self.size > 1:
            dist.init_process_group("gloo")

    def broadcast(self, tensors):
        if self.size == 1:
            return
        flat = _flatten_dense_tensors(tensors)
        dist.broadcast(flat, src=0)
        for t, v in zip(tensors, _unflatten_dense_tensors(flat, tensors)):
            t.copy_(v)

    def average(self, tensors):
        if self.size == 1:
            return
        flat = _flatten_dense_tensors(tensors)
        dist.all_reduce(flat)
        flat /= self.size
        for t, v in zip(tensors, _unflatten_dense_tensors(flat, tensors)):
            t.copy_(v)

    def total(self, value):
        if self.size > 1:
            dist.all_reduce(value)
        return value

    def close(self):
        if self.size > 1:
            dist.destroy_process_group()


def signals(n, seed):
    gen = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, 40)
    freq = 1 + 4 * torch.rand(n, 1, generator=gen)
    phase = 6.28 * torch.rand(n, 1, generator=gen)
    return torch.sin(6.28 * freq * t + phase) * (0.5 + torch.rand(n, 1, generator=gen))


class Autoencoder(nn.Module):
    def __init__(self, width, code):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(40, width), nn.GELU(), nn.Dropout(DROP), nn.Linear(width, code))
        self.decode = nn.Sequential(nn.Linear(code, width), nn.GELU(), nn.Dropout(DROP), nn.Linear(width, 40))

    def forward(self, x):
        return self.decode(self.encode(x))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    args = parser.parse_args()

    torch.set_default_dtype(torch.float64)
    worker = Worker()
    torch.manual_seed(args.seed + worker.rank)
    model = Autoencoder(64, 6)
    worker.broadcast([p.data for p in model.parameters()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, nesterov=True)

    train, test = signals(512, 1), signals(101, 2)
    order_gen = torch.Generator().manual_seed(args.seed)
    model.train()
    for _ in range(args.epochs):
        order = torch.randperm(len(train), generator=order_gen)
        for rows in order.split(args.batch):
            clean = train[rows[worker.rank::worker.size]]
            noisy = clean + NOISE * torch.randn_like(clean)
            loss = (model(noisy) - clean).square().mean()
            optimizer.zero_grad()
            loss.backward()
            worker.average([p.grad for p in model.parameters()])
            optimizer.step()

    model.eval()
    mine = test[worker.rank::worker.size]
    with torch.no_grad():
        error = (model(mine) - mine).square().sum()
    error = worker.total(error) / test.numel()
    if worker.rank == 0:
        print(f"reconstruction error {error.item():.8f}")
    worker.close()


if __name__ == "__main__":
    main()
