"""Learns one time step of a stirred fluid (1-d, periodic) with a small circular convolution net.

Gradients are exchanged without a wrapper: a hook starts the all-reduce of a parameter as soon
as its gradient is there, so that it overlaps with the rest of the backward pass. A step
consists of several micro-batches to bound the memory.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CELLS, BATCH, MICRO, EPOCHS = 32, 48, 2, 5


class Fields(Dataset):
    """Random smooth fields and the same fields after a step of viscous Burgers flow."""

    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        x = torch.arange(CELLS) * (2 * torch.pi / CELLS)
        modes = torch.arange(1, 5).float()
        phase = torch.rand(n, 4, 1, generator=g) * 2 * torch.pi
        size = torch.randn(n, 4, 1, generator=g) / modes[:, None] ** 0.5
        self.now = (size * torch.sin(modes[:, None] * x + phase)).sum(1)
        u = self.now.clone()
        for _ in range(12):
            left, right = u.roll(1, -1), u.roll(-1, -1)
            u = u - 0.03 * u * (right - left) + 0.06 * (right - 2 * u + left)
        self.change = (u - self.now) * 3

    def __len__(self):
        return len(self.now)

    def __getitem__(self, i):
        return self.now[i], self.change[i]


class Stepper(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, width, 5, padding=2, padding_mode="circular"), nn.GELU(),
            nn.Conv1d(width, width, 5, padding=2, padding_mode="circular"), nn.GELU(),
            nn.Conv1d(width, 1, 1))

    def forward(self, u):
        return self.layers(u[:, None])[:, 0]


class OverlappedReduce:
    """Sums every gradient over the processes while the backward pass is still running."""

    def __init__(self, model):
        self.params = [p for p in model.parameters() if p.requires_grad]
        self.pending = []
        for p in self.params:
            dist.broadcast(p.data, src=0)
            p.register_post_accumulate_grad_hook(self.start)

    def start(self, p):
        self.pending.append(dist.all_reduce(p.grad, async_op=True))

    def wait(self):
        for work in self.pending:
            work.wait()
        self.pending.clear()

    def average(self):
        for p in self.params:
            p.grad /= dist.get_world_size()


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29614")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    data = Fields(384, seed=4)
    sampler = DistributedSampler(data, seed=1, drop_last=True)
    loader = DataLoader(data, batch_size=BATCH // world // MICRO, sampler=sampler, drop_last=True)
    torch.manual_seed(2)
    model = Stepper()
    sync = OverlappedReduce(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        squares = torch.zeros(())
        for i, (now, change) in enumerate(loader):
            loss = (model(now) - change).square().mean() / MICRO
            loss.backward()
            sync.wait()
            squares += loss.detach()
            if (i + 1) % MICRO == 0:
                sync.average()
                optimizer.step()
                optimizer.zero_grad()
        dist.all_reduce(squares)
        if rank == 0:
            print(f"epoch {epoch} squared error {squares.item() / world / (len(loader) // MICRO):.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
