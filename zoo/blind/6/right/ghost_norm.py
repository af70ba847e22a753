"""Batch norm over small groups of rows. A step always has the same groups, however many ranks share them."""
import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

GROUP = 16


class GroupedBatchNorm(nn.Module):
    def __init__(self, dim, momentum=0.1, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))
        self.momentum, self.eps = momentum, eps

    def forward(self, x):
        if not self.training:
            return (x - self.mean) / (self.var + self.eps).sqrt() * self.weight + self.bias
        g = x.view(-1, GROUP, x.shape[1])
        mean, var = g.mean(1, keepdim=True), g.var(1, unbiased=False, keepdim=True)
        with torch.no_grad():
            self.mean.lerp_(mean.mean(0)[0], self.momentum)
            self.var.lerp_(var.mean(0)[0], self.momentum)
        y = ((g - mean) / (var + self.eps).sqrt()).view_as(x)
        return y * self.weight + self.bias


def merge_statistics(model, world):
    for b in model.buffers():
        dist.all_reduce(b)
        b /= world


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.n1 = nn.Linear(64, 48, bias=False), GroupedBatchNorm(48)
        self.l2, self.n2 = nn.Linear(48, 48, bias=False), GroupedBatchNorm(48)
        self.l3 = nn.Linear(48, 10)

    def forward(self, x):
        x = torch.relu(self.n1(self.l1(x)))
        return self.l3(torch.relu(self.n2(self.l2(x))))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--groups", type=int, default=4)
    ap.add_argument("--lr", type=float, default=0.1)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.data / 16, dtype=torch.float32), torch.tensor(d.target)
    torch.manual_seed(16)
    net = Net()
    model = DDP(net, broadcast_buffers=False)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    g = torch.Generator().manual_seed(4)
    for step in range(args.steps):
        rows = torch.randperm(1500, generator=g)[:args.groups * GROUP].chunk(world)[rank]
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 9:
            merge_statistics(net, world)
            net.eval()
            with torch.no_grad():
                out = net(x[1500:])
            net.train()
            if rank == 0:
                test = nn.functional.cross_entropy(out, y[1500:]).item()
                print(f"step {step + 1} test loss {test:.5f} hits {(out.argmax(1) == y[1500:]).sum().item()}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
