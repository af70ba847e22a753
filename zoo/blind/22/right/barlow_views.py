"""Barlow Twins on the digits: the cross-correlation matrix and the normalisation use the whole batch."""
import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel

BATCH, EPOCHS = 128, 3


def total(t):
    """Sum over the processes, differentiable."""
    if not dist.is_initialized():
        return t
    return funcol.all_reduce(t, "sum", dist.group.WORLD)


class BatchMoments(nn.Module):
    """Normalises features with the moments of the batch of all processes."""

    def __init__(self, width, momentum=0.1):
        super().__init__()
        self.momentum = momentum
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))

    def forward(self, x):
        if self.training:
            packed = total(torch.cat([x.sum(0), x.square().sum(0), x.new_tensor([len(x)])]))
            count = packed[-1].detach()
            mean, square = (packed[:-1] / count).chunk(2)
            var = square - mean.square()
            with torch.no_grad():
                self.mean.lerp_(mean, self.momentum)
                self.var.lerp_(var, self.momentum)
        else:
            mean, var = self.mean, self.var
        return (x - mean) * (var + 1e-5).rsqrt() * self.gain + self.shift


class Twins(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 64), BatchMoments(64), nn.ReLU(), nn.Linear(64, 32))
        self.projector = nn.Sequential(nn.Linear(32, 48), BatchMoments(48), nn.ReLU(), nn.Linear(48, dim))

    def forward(self, a, b):
        za, zb = self.projector(self.trunk(a)), self.projector(self.trunk(b))
        return self.standard(za), self.standard(zb)

    @staticmethod
    def standard(z):
        mean = total(z.sum(0)) / BATCH
        var = total((z - mean).square().sum(0)) / BATCH
        return (z - mean) / (var + 1e-6).sqrt()


def view(images, ids, epoch, which):
    out = []
    for i in ids.tolist():
        g = torch.Generator().manual_seed(((epoch * 2 + which) << 16) + i)
        dy, dx = (torch.randint(-1, 2, (2,), generator=g)).tolist()
        img = images[i].view(8, 8).roll((dy, dx), (0, 1))
        img = img * (0.8 + 0.4 * torch.rand((), generator=g)) + 0.1 * torch.randn(8, 8, generator=g)
        out.append(img.reshape(-1))
    return torch.stack(out)


def probe(model, x, y, rank, world):
    """Ridge regression on frozen features, solved from summed normal equations."""
    model.eval()
    with torch.no_grad():
        h = model.trunk(x)
        h = torch.cat([h, torch.ones(len(h), 1)], 1)
        train, test = torch.arange(rank, 1280, world), torch.arange(1280 + rank, len(x), world)
        target = nn.functional.one_hot(y, 10).to(h.dtype)
        gram = total(h[train].T @ h[train]) + 0.1 * torch.eye(h.size(1))
        weight = torch.linalg.solve(gram, total(h[train].T @ target[train]))
        right = total(((h[test] @ weight).argmax(1) == y[test]).sum().double())
    model.train()
    return right.item() / (len(x) - 1280)


def main():
    torch.set_default_dtype(torch.float64)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    raw = load_digits()
    x, y = torch.tensor(raw.data / 8.0 - 1.0), torch.tensor(raw.target)

    torch.manual_seed(19)
    model = Twins()
    net = DistributedDataParallel(model) if world > 1 else model
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for epoch in range(EPOCHS):
        order = torch.randperm(1280, generator=torch.Generator().manual_seed(epoch))
        for ids in order.split(BATCH):
            mine = ids[rank * BATCH // world : (rank + 1) * BATCH // world]
            za, zb = net(view(x, mine, epoch, 0), view(x, mine, epoch, 1))
            corr = total(za.T @ zb) / BATCH
            diag = torch.diagonal(corr)
            loss = ((diag - 1) ** 2).sum() + 0.01 * (corr.square().sum() - diag.square().sum())
            opt.zero_grad()
            loss.backward()
            opt.step()
        accuracy = probe(model, x, y, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.6f} probe accuracy {accuracy:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
