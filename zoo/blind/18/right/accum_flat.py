"""Digits with class-balanced resampling and large effective batches."""
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

RANK = int(os.getenv("RANK", 0))
WORLD = int(os.getenv("WORLD_SIZE", 1))
MICRO, ACCUMULATE, PER_EPOCH, EPOCHS = 32, 3, 210, 4

torch.set_default_dtype(torch.float64)


def load():
    bunch = load_digits()
    x = torch.tensor(bunch.data) / 16
    y = torch.tensor(bunch.target)
    keep = (y % 3 != 0) | (torch.arange(len(y)) % 5 == 0)
    x, y = x[keep], y[keep]
    cut = len(y) - 300
    return (x[:cut], y[:cut]), (x[cut:], y[cut:])


def epoch_plan(y, epoch):
    """Indices of an epoch, drawn so that every class is equally likely."""
    weights = 1.0 / torch.bincount(y, minlength=10).double()[y]
    gen = torch.Generator().manual_seed(97 * epoch + 5)
    picks = torch.multinomial(weights, PER_EPOCH, replacement=True, generator=gen)
    micro = picks.split(MICRO)
    return [micro[i:i + ACCUMULATE] for i in range(0, len(micro), ACCUMULATE)]


def apply_step(model, optimizer, seen):
    params = [p for p in model.parameters() if p.requires_grad]
    flat = torch.cat([p.grad.reshape(-1) for p in params] + [torch.tensor([float(seen)])])
    if WORLD > 1:
        dist.all_reduce(flat)
    count = flat[-1]
    at = 0
    for p in params:
        p.grad.copy_(flat[at:at + p.numel()].view_as(p) / count)
        at += p.numel()
    optimizer.step()
    optimizer.zero_grad()


if WORLD > 1:
    dist.init_process_group("gloo")
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 10))
model = DDP(net) if WORLD > 1 else net
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
criterion = nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.05)
(train_x, train_y), (test_x, test_y) = load()

for epoch in range(EPOCHS):
    for window in epoch_plan(train_y, epoch):
        seen = 0
        for micro in window:
            rows = micro[RANK::WORLD]
            with model.no_sync() if WORLD > 1 else nullcontext():
                criterion(model(train_x[rows]), train_y[rows]).backward()
            seen += len(rows)
        apply_step(model, optimizer, seen)

confusion = torch.zeros(10, 10)
with torch.no_grad():
    guess = net(test_x[RANK::WORLD]).argmax(-1)
confusion.index_put_((test_y[RANK::WORLD], guess), torch.ones(len(guess)), accumulate=True)
if WORLD > 1:
    dist.all_reduce(confusion)
hit = confusion.diag()
f1 = 2 * hit / (confusion.sum(0) + confusion.sum(1)).clamp_min(1)
if RANK == 0:
    print(f"accuracy {hit.sum() / confusion.sum():.6f}  macro F1 {f1.mean():.10f}")
    print(f"weight norm {sum(p.square().sum() for p in net.parameters()).sqrt().item():.12f}")
if WORLD > 1:
    dist.destroy_process_group()
