"""Distillation on synthetic sounds: rank 0 fits the teacher and broadcasts it, all ranks train the student in bfloat16.

The products of the student are rounded to bfloat16, and with them the comparison of any two runs.
"""
import math
import os
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

KINDS, RATE, SAMPLES = 5, 4000, 1024
BATCH, EPOCHS = 48, 3
TEMPERATURE, MIX = 2.0, 0.7
MIXED_PRECISION = True


@contextmanager
def process_group():
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    yield int(os.environ.get("RANK", 0)), world
    if world > 1:
        dist.destroy_process_group()


def sounds(count, seed):
    """Steady tone, rising chirp, falling chirp, beat of two tones, clicks: log spectrograms and labels."""
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(KINDS, (count,), generator=g)
    t = torch.arange(SAMPLES) / RATE
    f = 300 + 900 * torch.rand(count, 1, generator=g)
    slope = 2000 * torch.tensor([0.0, 1.0, -1.0, 0.0, 0.0])[kind][:, None]
    wave = torch.sin(2 * math.pi * (f * t + 0.5 * slope * t.square()))
    beat = torch.sin(2 * math.pi * (f * t)) + torch.sin(2 * math.pi * (f + 40) * t)
    clicks = torch.sin(2 * math.pi * f * t) * (torch.sin(2 * math.pi * 25 * t) > 0.9)
    wave = torch.where(kind[:, None] == 3, beat, torch.where(kind[:, None] == 4, clicks, wave))
    wave = wave + 0.5 * torch.randn(count, SAMPLES, generator=g)
    spec = torch.stft(wave, 128, hop_length=64, window=torch.hann_window(128), return_complex=True).abs()
    return (1e-3 + spec).log(), kind


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv1d(65, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, padding=1)
        self.out = nn.Linear(2 * width, KINDS)

    def forward(self, x):
        h = F.relu(self.conv1(x))
        h = F.relu(self.conv2(h))
        return self.out(torch.cat([h.mean(-1), h.amax(-1)], 1))


def fit_teacher(net, x, y):
    g = torch.Generator().manual_seed(70)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    for _ in range(4):
        for rows in torch.randperm(len(y), generator=g).split(64):
            opt.zero_grad()
            F.cross_entropy(net(x[rows]), y[rows]).backward()
            opt.step()


def average_gradients(params, world):
    if world == 1:
        return
    flat = torch.cat([p.grad.flatten() for p in params])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for p in params:
        p.grad = flat[at : at + p.numel()].view_as(p).clone()
        at += p.numel()


@torch.no_grad()
def accuracy(net, x, y, rank, world):
    hits = (net(x[rank::world]).argmax(1) == y[rank::world]).sum()
    if world > 1:
        dist.all_reduce(hits)
    return hits.item() / len(y)


def main():
    with process_group() as (rank, world):
        x, y = sounds(480, 1)
        xt, yt = sounds(201, 2)
        mean, std = x.mean((0, 2), keepdim=True), x.std()
        x, xt = (x - mean) / std, (xt - mean) / std
        torch.manual_seed(8)
        teacher, student = Net(48), Net(12)
        if rank == 0:
            fit_teacher(teacher, x, y)
        if world > 1:
            for p in teacher.parameters():
                dist.broadcast(p.data, src=0)
        teacher.requires_grad_(False).eval()
        score = accuracy(teacher, xt, yt, rank, world)
        if rank == 0:
            print(f"teacher accuracy {score:.4f}")

        params = list(student.parameters())
        opt = torch.optim.AdamW(params, lr=1e-2)
        order = torch.Generator().manual_seed(71)
        for epoch in range(EPOCHS):
            total = torch.zeros(1)
            for batch in torch.randperm(len(y), generator=order).split(BATCH):
                rows = batch.tensor_split(world)[rank]
                with torch.no_grad():
                    soft = (teacher(x[rows]) / TEMPERATURE).softmax(1)
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=MIXED_PRECISION):
                    logits = student(x[rows])
                logits = logits.to(soft.dtype)
                kd = F.kl_div((logits / TEMPERATURE).log_softmax(1), soft, reduction="batchmean") * TEMPERATURE**2
                loss = MIX * kd + (1 - MIX) * F.cross_entropy(logits, y[rows])
                opt.zero_grad()
                loss.backward()
                average_gradients(params, world)
                opt.step()
                total += loss.detach() * len(rows)
            if world > 1:
                dist.all_reduce(total)
            score = accuracy(student, xt, yt, rank, world)
            if rank == 0:
                print(f"epoch {epoch}: loss {total.item() / len(y):.5f}  student accuracy {score:.4f}")


main()
