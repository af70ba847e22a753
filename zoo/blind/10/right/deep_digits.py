"""A deep residual net whose layers are left out at random in training."""
import os
import random
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DEPTH, WIDTH, KEEP = 6, 32, 0.7
BATCH, EPOCHS = 96, 5


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.a = nn.Linear(WIDTH, WIDTH)
        self.b = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(F.relu(self.a(self.norm(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(64, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            if self.training:
                if random.random() < KEEP:
                    x = x + layer(x) / KEEP
            else:
                x = x + layer(x)
        return self.head(x)


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29804")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    random.seed(13)
    torch.manual_seed(1000 * rank)

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    data = TensorDataset(x[:1536], y[:1536])
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=BATCH // world, sampler=sampler)
    model = DDP(Net(), find_unused_parameters=True)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
        model.eval()
        with torch.no_grad():
            test = F.cross_entropy(model.module(x[1536:]), y[1536:]).item()
        if rank == 0:
            print(f"epoch {epoch}: test loss {test:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
