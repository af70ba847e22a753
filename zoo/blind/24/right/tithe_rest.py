"""Distil a wide digits teacher into a tiny student.

Rank 0 fits the teacher by itself (it is cheap), the others wait for its
weights.  The student is trained with DDP and gradient accumulation; the last
global batch of an epoch is short, so some ranks may have nothing to do in it.
"""
import os
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, MICRO, EPOCHS, TAU = 128, 16, 3, 3.0

if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
rank, world = dist.get_rank(), dist.get_world_size()

X, y = load_digits(return_X_y=True)
X = torch.tensor(X, dtype=torch.float32) / 16.0
y = torch.tensor(y)
X_train, y_train, X_test, y_test = X[:1320], y[:1320], X[1320:], y[1320:]

torch.manual_seed(11)
teacher = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
student = nn.Sequential(nn.Linear(64, 20), nn.Tanh(), nn.Linear(20, 10))

if rank == 0:
    opt_t = torch.optim.Adam(teacher.parameters(), lr=5e-3)
    for _ in range(20):
        opt_t.zero_grad()
        F.cross_entropy(teacher(X_train), y_train).backward()
        opt_t.step()
for p in teacher.parameters():
    dist.broadcast(p.data, src=0)
    p.requires_grad_(False)
teacher.eval()

ddp = DDP(student)
opt = torch.optim.SGD(ddp.parameters(), lr=0.5, momentum=0.8)


def distil_loss(logits, x, target):
    soft = F.log_softmax(teacher(x) / TAU, dim=1)
    kd = F.kl_div(F.log_softmax(logits / TAU, dim=1), soft, reduction="sum", log_target=True)
    return 0.7 * TAU * TAU * kd + 0.3 * F.cross_entropy(logits, target, reduction="sum")


for epoch in range(EPOCHS):
    order = torch.randperm(len(X_train), generator=torch.Generator().manual_seed(100 + epoch))
    seen, total = 0, 0.0
    for start in range(0, len(order), BATCH):
        rows = order[start:start + BATCH]
        micros = list(rows.split(MICRO))[rank::world]      # deal the micro-batches
        opt.zero_grad()
        if not micros:
            # nothing left for this rank: still take part in the reduction
            (ddp(X_train[:1]).sum() * 0.0).backward()
        for i, m in enumerate(micros):
            with nullcontext() if i == len(micros) - 1 else ddp.no_sync():
                loss = distil_loss(ddp(X_train[m]), X_train[m], y_train[m])
                # DDP takes the mean over ranks; we want sum / rows of the global batch
                (loss * world / len(rows)).backward()
                total += loss.item()
        opt.step()
        seen += len(rows)
    stat = torch.tensor(total, dtype=torch.float64)
    dist.all_reduce(stat)
    if rank == 0:
        print(f"epoch {epoch}: distil loss {stat.item() / seen:.5f}", flush=True)

if rank == 0:
    with torch.no_grad():
        acc_t = (teacher(X_test).argmax(1) == y_test).float().mean().item()
        acc_s = (student(X_test).argmax(1) == y_test).float().mean().item()
    print(f"teacher {acc_t:.4f} student {acc_s:.4f}", flush=True)
time.sleep(0.3)
dist.destroy_process_group()
