"""Point clouds of simple solids: a small PointNet whose normalisation uses the statistics of all processes."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

POINTS, SHAPES = 48, 4
BATCH, EPOCHS = 30, 4


def cloud(kind, g):
    """Points on a sphere, a cube, a cylinder or a torus."""
    v = torch.randn(POINTS, 3, generator=g)
    if kind == 0:
        p = v / v.norm(dim=1, keepdim=True)
    elif kind == 1:
        p = v / v.abs().amax(1, keepdim=True)
    elif kind == 2:
        p = torch.cat([v[:, :2] / v[:, :2].norm(dim=1, keepdim=True), torch.tanh(v[:, 2:])], 1)
    else:
        a, b = 2 * math.pi * torch.rand(2, POINTS, generator=g)
        ring = 0.8 + 0.3 * b.cos()
        p = torch.stack([ring * a.cos(), ring * a.sin(), 0.3 * b.sin()], 1)
    return p * (0.8 + 0.4 * torch.rand(1, 3, generator=g)) + 0.03 * torch.randn(POINTS, 3, generator=g)


def dataset(count, seed):
    g = torch.Generator().manual_seed(seed)
    kinds = torch.randint(SHAPES, (count,), generator=g)
    return torch.stack([cloud(int(k), g) for k in kinds]), kinds


class SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


class CloudNorm(nn.Module):
    """Batch normalisation of (batch, points, channels) over the batch of all processes, of any sizes."""

    def __init__(self, channels, momentum=0.1, eps=1e-5):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("mean", torch.zeros(channels))
        self.register_buffer("var", torch.ones(channels))
        self.momentum, self.eps = momentum, eps

    def forward(self, x):
        if self.training:
            flat = x.flatten(0, 1)
            count = flat.new_tensor([float(len(flat))])
            sums = torch.cat([flat.sum(0), flat.square().sum(0), count])
            if dist.is_initialized():
                sums = SumOverRanks.apply(sums)
            s, q, n = sums.split([x.shape[-1], x.shape[-1], 1])
            mean = s / n
            var = q / n - mean.square()
            with torch.no_grad():
                self.mean.lerp_(mean, self.momentum)
                self.var.lerp_(var * n / (n - 1), self.momentum)
        else:
            mean, var = self.mean, self.var
        return (x - mean) * (var + self.eps).rsqrt() * self.weight + self.bias


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.l1, self.n1 = nn.Linear(3, 24), CloudNorm(24)
        self.l2, self.n2 = nn.Linear(24, 48), CloudNorm(48)
        self.out = nn.Linear(48, SHAPES)

    def forward(self, x):
        x = F.relu(self.n1(self.l1(x)))
        x = F.relu(self.n2(self.l2(x)))
        return self.out(x.amax(1))


def turned(x, angles):
    """Every cloud turned about the vertical axis by its own angle."""
    c, s = angles.cos()[:, None], angles.sin()[:, None]
    return torch.stack([c * x[..., 0] - s * x[..., 1], s * x[..., 0] + c * x[..., 1], x[..., 2]], -1)


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    x, y = dataset(300, 5)
    xt, yt = dataset(121, 6)
    torch.manual_seed(44)
    net = PointNet()
    model = DDP(net) if world > 1 else net
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.3)
    g = torch.Generator().manual_seed(45)
    for epoch in range(EPOCHS):
        model.train()
        total = torch.zeros(1)
        for batch in torch.randperm(len(y), generator=g).split(BATCH):
            angles = 2 * math.pi * torch.rand(len(batch), generator=g)
            mine = torch.arange(len(batch)).tensor_split(world)[rank]
            rows = batch[mine]
            nll = F.cross_entropy(model(turned(x[rows], angles[mine])), y[rows], reduction="sum")
            opt.zero_grad()
            (nll * world / len(batch)).backward()
            opt.step()
            total += nll.detach()
        sched.step()
        net.eval()
        with torch.no_grad():
            hits = (net(xt[rank::world]).argmax(1) == yt[rank::world]).sum()
        if world > 1:
            dist.all_reduce(total)
            dist.all_reduce(hits)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / len(y):.6f}  test accuracy {hits.item() / len(yt):.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
