"""Semi-supervised load forecasting with a mean teacher; Adam is sharded over the processes."""
import os

import torch
import torch.distributed as dist
from torch import nn

PAST, AHEAD = 24, 6
GLOBAL_BATCH, STEPS = 32, 40
DECAY = 0.9


def make_series(hours=1500):
    g = torch.Generator().manual_seed(31)
    t = torch.arange(hours, dtype=torch.float64)
    daily = torch.sin(2 * torch.pi * t / 24) + 0.4 * torch.cos(4 * torch.pi * t / 24)
    weekly = 0.5 * torch.sin(2 * torch.pi * t / 168)
    drift = 0.05 * torch.randn(hours, generator=g, dtype=torch.float64).cumsum(0)
    series = daily + weekly + drift
    return ((series - series.mean()) / series.std()).unfold(0, PAST + AHEAD, 1)


class FlatModel:
    """A module whose parameters are views of one flat vector."""

    def __init__(self, module, world):
        self.module = module
        params = list(module.parameters())
        size = sum(p.numel() for p in params)
        self.flat = torch.zeros(-(-size // world) * world, dtype=torch.float64)
        self.grad = torch.zeros_like(self.flat)
        at = 0
        for p in params:
            n = p.numel()
            self.flat[at : at + n] = p.detach().flatten()
            p.data = self.flat[at : at + n].view(p.shape)
            p.grad = self.grad[at : at + n].view(p.shape)
            at += n


class ShardedAdam:
    def __init__(self, model, lr, rank, world):
        self.model, self.world = model, world
        size = len(model.flat) // world
        self.span = slice(rank * size, (rank + 1) * size)
        self.shard = model.flat[self.span].clone()
        self.inner = torch.optim.Adam([self.shard], lr=lr)

    def step(self):
        self.shard.grad = self.model.grad[self.span].clone()
        self.inner.step()
        self.model.flat[self.span] = self.shard

    def share(self):
        if self.world > 1:
            dist.all_gather(list(self.model.flat.chunk(self.world)), self.shard)


def network():
    return nn.Sequential(nn.Linear(PAST, 32), nn.Tanh(), nn.Linear(32, AHEAD)).double()


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    windows = make_series()
    past, future = windows[:, :PAST], windows[:, PAST:]
    labelled = torch.arange(len(windows)) % 5 == 0

    torch.manual_seed(0)
    student = FlatModel(network(), world)
    teacher = FlatModel(network(), world)
    teacher.flat.copy_(student.flat)
    optimizer = ShardedAdam(student, 5e-3, rank, world)
    picks = torch.Generator().manual_seed(2)

    for step in range(STEPS):
        ids = torch.randint(0, 1000, (GLOBAL_BATCH,), generator=picks)
        jitter = 0.05 * torch.randn(2, GLOBAL_BATCH, PAST, generator=picks, dtype=torch.float64)
        ids, jitter = ids[rank::world], jitter[:, rank::world]
        out = student.module(past[ids] + jitter[0])
        with torch.no_grad():
            target = teacher.module(past[ids] + jitter[1])
        supervised = (out - future[ids]).square().mean(1) * labelled[ids]
        consistent = (out - target).square().mean(1)
        loss = (supervised + 2.0 * consistent).sum() / GLOBAL_BATCH
        student.grad.zero_()
        loss.backward()
        if world > 1:
            dist.all_reduce(student.grad)
        optimizer.step()
        teacher.flat.lerp_(student.flat, 1 - DECAY)
        optimizer.share()
        if step % 10 == 9:
            shown = loss.detach().clone()
            if world > 1:
                dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} loss {shown.item():.8f}")

    if rank == 0:
        with torch.no_grad():
            error = (teacher.module(past[1000:]) - future[1000:]).square().mean()
        print(f"teacher error {error.item():.8f} norm {teacher.flat.square().sum().item():.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
