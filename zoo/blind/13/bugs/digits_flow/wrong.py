"""Class-conditional flow matching on digits (principal components), with a Frechet distance at the end."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

DIM, CLASSES = 8, 10


class Velocity(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(DIM + CLASSES + 1, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, DIM)
        )

    def forward(self, x, t, label):
        return self.net(torch.cat([x, t, F.one_hot(label, CLASSES).to(x.dtype)], dim=1))


def components():
    digits = load_digits()
    x = torch.tensor(digits.data)
    x = x - x.mean(dim=0)
    _, _, v = torch.linalg.svd(x, full_matrices=False)
    v = v * v.gather(1, v.abs().argmax(1, keepdim=True)).sign()
    x = x @ v[:DIM].T
    return x / x.std(), torch.tensor(digits.target)


@torch.no_grad()
def generate(net, label, noise, steps=10):
    x = noise
    for k in range(steps):
        x = x + net(x, torch.full((len(x), 1), k / steps), label) / steps
    return x


def moments(x, world):
    mean, cov = x.mean(dim=0), torch.cov(x.T, correction=0)
    for m in (mean, cov):
        dist.all_reduce(m)
        m /= world
    return mean, cov


def frechet(a, b):
    root = torch.linalg.eigvals(a[1] @ b[1]).real.clamp(min=0).sqrt().sum()
    return ((a[0] - b[0]) ** 2).sum() + a[1].trace() + b[1].trace() - 2 * root


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--samples", type=int, default=40, help="for each class")
    args = p.parse_args()

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(15)
    data, target = components()
    model = DDP(Velocity())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr, eps=1e-5)
    g = torch.Generator().manual_seed(3)

    shown = torch.zeros(())
    for step in range(args.steps):
        rows = torch.randint(len(data), (args.batch,), generator=g)[rank::world]
        noise = torch.randn(args.batch, DIM, generator=g)[rank::world]
        t = torch.rand(args.batch, 1, generator=g)[rank::world]
        guess = model((1 - t) * noise + t * data[rows], t, target[rows])
        loss = F.mse_loss(guess, data[rows] - noise)
        opt.zero_grad()
        loss.backward()
        opt.step()
        shown += loss.detach() / 20
        if step % 20 == 19:
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} loss {shown / world:.5f}")
            shown = torch.zeros(())

    label = torch.arange(CLASSES).repeat_interleave(args.samples)
    noise = torch.randn(len(label), DIM, generator=g)
    made = generate(model.module, label.chunk(world)[rank], noise.chunk(world)[rank])
    reference = data.mean(dim=0), torch.cov(data.T, correction=0)
    distance = frechet(moments(made, world), reference)
    if rank == 0:
        print(f"Frechet distance {distance:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
