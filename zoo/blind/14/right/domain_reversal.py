"""Domain adaptation by gradient reversal (DANN): digits -> pale, blurred digits.

Two loaders, one for each domain, of different lengths; the shorter one starts anew when
it is through. DDP; the PowerSGD hook is set up for long runs and begins to compress
only after `--compress-after` steps.
"""
import argparse
import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


class Dann(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh())
        self.label = nn.Linear(32, 10)
        self.domain = nn.Sequential(nn.Linear(32, 24), nn.Tanh(), nn.Linear(24, 1))

    def forward(self, x, n_labelled, strength):
        codes = self.body(x)
        return self.label(codes[:n_labelled]), self.domain(Reverse.apply(codes, strength))[:, 0]


def domains():
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(1).permutation(len(x))
    x, y = torch.tensor(x[order], dtype=torch.float32) / 16, torch.tensor(y[order])
    other = x.view(-1, 8, 8)
    other = 0.2 + 0.3 * (other + other.roll(1, 2))
    return (x[:900], y[:900]), (other[900:1540].reshape(-1, 64),), (other[1540:].reshape(-1, 64), y[1540:])


class Endless:
    """Goes through a loader again and again, each time in a new order."""

    def __init__(self, loader):
        self.loader, self.rounds, self.it = loader, 0, None

    def __next__(self):
        try:
            if self.it is None:
                raise StopIteration
            return next(self.it)
        except StopIteration:
            self.loader.sampler.set_epoch(self.rounds)
            self.rounds += 1
            self.it = iter(self.loader)
            return next(self.it)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=45)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--compress-after", type=int, default=5000)
    args = p.parse_args()
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29615")):
        os.environ.setdefault(name, value)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)

    source, target, test = domains()
    source, target = TensorDataset(*source), TensorDataset(*target)
    feeds = []
    for data in (source, target):
        sampler = DistributedSampler(data, seed=len(data))
        feeds.append(Endless(DataLoader(data, args.batch // world, sampler=sampler, drop_last=True)))

    model = DistributedDataParallel(Dann())
    model.register_comm_hook(powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=args.compress_after), powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(args.steps):
        progress = step / args.steps
        strength = 2 / (1 + math.exp(-10 * progress)) - 1
        for group in optimizer.param_groups:
            group["lr"] = 0.2 / (1 + 10 * progress) ** 0.75
        (xs, ys), (xt,) = next(feeds[0]), next(feeds[1])
        scores, guess = model(torch.cat([xs, xt]), len(xs), 0.3 * strength)
        truth = torch.cat([torch.zeros(len(xs)), torch.ones(len(xt))])
        label_loss, domain_loss = F.cross_entropy(scores, ys), F.binary_cross_entropy_with_logits(guess, truth)
        optimizer.zero_grad(set_to_none=False)
        (label_loss + domain_loss).backward()
        optimizer.step()
        if step % 9 == 8:
            seen = torch.stack([label_loss.detach(), domain_loss.detach()])
            dist.reduce(seen, 0)
            if rank == 0:
                print(f"step {step + 1}: labels {seen[0] / world:.4f}, domains {seen[1] / world:.4f}, "
                      f"rounds {feeds[0].rounds} and {feeds[1].rounds}")
    if rank == 0:       # 257 pictures: not worth sharing out
        with torch.no_grad():
            scores, _ = model.module(test[0], len(test[0]), 0.0)
        print(f"target domain: {(scores.argmax(1) == test[1]).sum().item()} of {len(test[1])} right")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
