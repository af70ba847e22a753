"""Small convnet on sklearn's digits.  Each epoch visits every training image exactly once."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP


class SumOverGroup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t):
        t = t.clone()
        dist.all_reduce(t)
        return t

    @staticmethod
    def backward(ctx, g):
        g = g.clone()
        dist.all_reduce(g)
        return g


class GroupBatchNorm2d(nn.Module):
    """Batch norm whose statistics cover the images of all processes; shares may have different sizes."""

    def __init__(self, channels, momentum=0.1, eps=1e-5):
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x):
        if self.training:
            count = torch.tensor(float(x.numel() // x.shape[1]))
            dist.all_reduce(count)
            mean = SumOverGroup.apply(x.sum((0, 2, 3))) / count
            centred = x - mean[None, :, None, None]
            var = SumOverGroup.apply((centred * centred).sum((0, 2, 3))) / count
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var * count / (count - 1), self.momentum)
        else:
            mean, var = self.running_mean, self.running_var
            centred = x - mean[None, :, None, None]
        scale = self.weight * torch.rsqrt(var + self.eps)
        return centred * scale[None, :, None, None] + self.bias[None, :, None, None]


def build():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False), GroupBatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1, bias=False), GroupBatchNorm2d(24), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 10))


def evaluate(net, x, y, rank, world):
    net.eval()
    tally = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for part in torch.arange(len(x))[rank::world].split(64):
            out = net(x[part])
            tally += torch.tensor([(out.argmax(1) == y[part]).sum().item(), len(part)], dtype=torch.float64)
    dist.all_reduce(tally)
    net.train()
    return tally[0].item() / tally[1].item(), int(tally[1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--global-batch", type=int, default=100)
    ap.add_argument("--lr", type=float, default=0.08)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    train_x, train_y, test_x, test_y = x[:1437], y[:1437], x[1437:], y[1437:]

    torch.manual_seed(7)
    net = DDP(build(), broadcast_buffers=False)
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
    for epoch in range(args.epochs):
        order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(epoch))
        for chunk in order.split(args.global_batch):
            mine = chunk[rank::world]
            loss = F.cross_entropy(net(train_x[mine]), train_y[mine], reduction="sum")
            opt.zero_grad()
            (loss * world / len(chunk)).backward()
            opt.step()
        acc, seen = evaluate(net.module, test_x, test_y, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: test accuracy {acc:.4f} on {seen} images")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
