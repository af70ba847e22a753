# A classifier whose wide layers are spread over the processes (columns of the first, rows of the second).
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29712")
HIDDEN, STEPS, BATCH = 64, 90, 50


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g)
        return g


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, g):
        return g


class SplitMLP(nn.Module):
    def __init__(self, dim, hidden, rank, world):
        super().__init__()
        up = nn.Linear(dim, hidden)
        down = nn.Linear(hidden, dim)
        self.up_weight = nn.Parameter(up.weight.detach().chunk(world, 0)[rank].clone())
        self.up_bias = nn.Parameter(up.bias.detach().chunk(world, 0)[rank].clone())
        self.down_weight = nn.Parameter(down.weight.detach().chunk(world, 1)[rank].clone())
        self.down_bias = nn.Parameter(down.bias.detach().clone())

    def forward(self, x):
        h = F.gelu(F.linear(Enter.apply(x), self.up_weight, self.up_bias))
        return x + Leave.apply(F.linear(h, self.down_weight)) + self.down_bias


class Net(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.stem = nn.Linear(64, 32)
        self.layers = nn.Sequential(SplitMLP(32, HIDDEN, rank, world), SplitMLP(32, HIDDEN, rank, world))
        self.head = nn.Linear(32, 10)

    def forward(self, x):
        return self.head(self.layers(torch.tanh(self.stem(x))))


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    torch.manual_seed(14)
    net = Net(rank, world)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    g = torch.Generator().manual_seed(3)
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(x), (BATCH,), generator=g)
        loss = F.cross_entropy(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 15 == 0:
            print(f"step {step} loss {loss.item():.6f}", flush=True)
    with torch.no_grad():
        accuracy = (net(x).argmax(1) == y).float().mean().item()
    if rank == 0:
        print(f"accuracy {accuracy:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
