"""Adapts a frozen acoustic model to a new accent with low-rank updates and gradient accumulation."""
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

BANDS, FRAMES, PHONES = 16, 12, 10
MICRO_BATCH, ACCUMULATE, EPOCHS = 16, 3, 4


class LoRA(nn.Module):
    def __init__(self, linear, rank=3, alpha=6.0):
        super().__init__()
        self.linear = linear
        self.a = nn.Parameter(torch.randn(rank, linear.in_features) / rank)
        self.b = nn.Parameter(torch.zeros(linear.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.linear(x) + self.scale * (x @ self.a.T @ self.b.T)


class Acoustic(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(BANDS, 32)
        self.hidden = nn.Linear(32, 32)
        self.leave = nn.Linear(32, PHONES)

    def forward(self, x):
        h = torch.tanh(self.enter(x))
        return self.leave(torch.tanh(self.hidden(h)).mean(1))


def make_speech(n, seed, tilt):
    g = torch.Generator().manual_seed(seed)
    shapes = torch.randn(PHONES, BANDS, generator=torch.Generator().manual_seed(50))
    label = torch.randint(0, PHONES, (n,), generator=g)
    x = shapes[label][:, None] + 0.8 * torch.randn(n, FRAMES, BANDS, generator=g)
    return x + tilt * torch.linspace(-1, 1, BANDS), label


def pretrain():
    torch.manual_seed(0)
    model = Acoustic()
    x, y = make_speech(256, 60, tilt=0.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(30):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.requires_grad_(False)


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    model = pretrain()
    model.enter, model.hidden = LoRA(model.enter), LoRA(model.hidden)
    ddp = DDP(model)
    adapters = [p for p in ddp.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=5e-3)
    x, y = make_speech(128, 61, tilt=2.0)

    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        batches = order[: 7 * MICRO_BATCH].split(MICRO_BATCH)
        running = torch.zeros(())
        for i, batch in enumerate(batches):
            window = min(ACCUMULATE, len(batches) - i // ACCUMULATE * ACCUMULATE)
            boundary = (i + 1) % ACCUMULATE == 0
            mine = batch[rank::world]
            with contextlib.nullcontext() if boundary else ddp.no_sync():
                loss = F.cross_entropy(ddp(x[mine]), y[mine])
                (loss / window).backward()
            if boundary or i + 1 == len(batches):
                optimizer.step()
                optimizer.zero_grad()
            running += loss.detach()
        dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch} loss {running.item() / world / len(batches):.8f}")

    test_x, test_y = make_speech(200, 62, tilt=2.0)
    with torch.no_grad():
        right = (model(test_x[rank::world]).argmax(1) == test_y[rank::world]).sum()
    dist.all_reduce(right)
    if rank == 0:
        norm = sum(p.detach().square().sum() for p in adapters)
        print(f"test {right.item()}/{len(test_x)} adapter norm {norm.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
