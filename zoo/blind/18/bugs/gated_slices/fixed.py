"""Wine cultivars with gated feed-forward blocks; the hidden units of each block are divided among the processes.

The modules are made without storage first and every process then fills in its own part.
"""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine

WIDTH, HIDDEN, BLOCKS = 16, 32, 2
rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        if world > 1:
            dist.all_reduce(grad)
        return grad


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.contiguous().clone()
        if world > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        part = HIDDEN // world
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, part, bias=False)
        self.up = nn.Linear(WIDTH, part, bias=False)
        self.down = nn.Linear(part, WIDTH, bias=False)

    def forward(self, x):
        h = Enter.apply(self.norm(x))
        return x + Leave.apply(self.down(F.silu(self.gate(h)) * self.up(h)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(13, WIDTH)
        self.blocks = nn.ModuleList([Gated() for _ in range(BLOCKS)])
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def split_dim(name):
    if name.endswith(("gate.weight", "up.weight")):
        return 0
    return 1 if name.endswith("down.weight") else None


@torch.no_grad()
def fill(net, seed):
    gen = torch.Generator().manual_seed(seed)
    for name, p in net.named_parameters():
        if p.ndim == 1:
            p.fill_(1.0 if name.endswith("norm.weight") else 0.0)
            continue
        shape, dim = list(p.shape), split_dim(name)
        if dim is not None:
            shape[dim] *= world
        value = torch.randn(shape, generator=gen) / math.sqrt(shape[1])
        p.copy_(value if dim is None else value.chunk(world, dim)[rank])


def main():
    torch.set_default_dtype(torch.float64)
    if world > 1:
        dist.init_process_group("gloo")
    with torch.device("meta"):
        net = Net()
    net.to_empty(device="cpu")
    fill(net, seed=2)

    wine = load_wine()
    x, y = torch.tensor(wine.data), torch.tensor(wine.target)
    x = (x - x.mean(0)) / x.std(0)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    train, test = order[:128], order[128:]
    opt = torch.optim.SGD(net.parameters(), lr=0.03, momentum=0.9, weight_decay=1e-3)
    for epoch in range(8):
        shuffled = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(10 + epoch))]
        for rows in shuffled.split(16):
            loss = F.cross_entropy(net(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            out = net(x[test])
        if rank == 0 and epoch % 2 == 1:
            value = F.cross_entropy(out, y[test]).item()
            print(f"epoch {epoch + 1} train {loss.item():.8f} test {value:.8f} right {(out.argmax(1) == y[test]).sum().item()}/50")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
