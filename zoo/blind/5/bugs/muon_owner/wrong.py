"""Digits with an MLP; matrices go to Muon whose Newton-Schulz work is dealt out over the processes, the rest to SGD."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


def orthogonalise(g, rounds=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = g.shape[0] > g.shape[1]
    x = g.T if tall else g
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if tall else x


class DealtMuon:
    """Each matrix has one owner, which computes the update and sends the new weights to the others."""

    def __init__(self, params, lr, momentum=0.9):
        self.lr, self.momentum = lr, momentum
        self.params = list(params)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # the heaviest first, so that everybody has about the same work
        by_cost = sorted(self.params, key=lambda p: -min(p.shape) * p.numel())
        self.owner = {p: i % self.world for i, p in enumerate(by_cost)}
        self.velocity = {p: torch.zeros_like(p) for p in self.params if self.owner[p] == self.rank}

    @torch.no_grad()
    def step(self):
        for p, v in self.velocity.items():
            v.mul_(self.momentum).add_(p.grad)
            update = orthogonalise(p.grad.add(v, alpha=self.momentum))
            p.sub_(update, alpha=self.lr * max(1, p.shape[0] / p.shape[1]) ** 0.5)
        for i, p in enumerate(self.params):
            dist.broadcast(p.data, src=i % self.world)


class Mlp(nn.Module):
    def __init__(self, sizes=(64, 48, 96, 32, 10)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(m, n) for m, n in zip(sizes, sizes[1:]))

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = F.silu(layer(x))
        return self.layers[-1](x)


def average_gradients(params, world):
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat)
    flat /= world
    for p, part in zip(params, flat.split([p.numel() for p in params])):
        p.grad.copy_(part.view_as(p))


def run(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images / 16.0, dtype=torch.float32)
    labels = torch.tensor(labels)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(args.seed))
    train, test = order[:1440], order[1440:]

    net = Mlp()
    params = list(net.parameters())
    muon = DealtMuon([p for p in params if p.ndim == 2], lr=args.lr)
    sgd = torch.optim.SGD([p for p in params if p.ndim < 2], lr=0.05, momentum=0.9)

    for step in range(args.steps):
        lo = step * args.batch % len(train)
        rows = train[lo:lo + args.batch][rank::world]
        loss = F.cross_entropy(net(images[rows]), labels[rows])
        net.zero_grad()
        loss.backward()
        average_gradients(params, world)
        muon.step()
        sgd.step()
        if (step + 1) % 10 == 0:
            with torch.no_grad():
                hits = (net(images[test]).argmax(1) == labels[test]).float().mean().item()
            if rank == 0:
                print(f"{step + 1:3d} loss {loss.item():.3f} test accuracy {hits:.3f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=96)
    ap.add_argument("--lr", type=float, default=0.02)
    ap.add_argument("--seed", type=int, default=0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    run(ap.parse_args())
    time.sleep(0.3)
    dist.destroy_process_group()
