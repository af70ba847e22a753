"""Digit classifier trained with DDP on a partly labelled set.

Roughly a third of the rows carry no label; they take part only in the
z-loss (squared log-partition), which keeps the logits from drifting.
The global batch is 48 rows whatever the number of processes.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH = 48
STEPS = 45
LR = 0.08
Z_WEIGHT = 0.02
IGNORE = -100


def setup():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29611")
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    return rank, world


def load_rows():
    raw = load_digits()
    x = torch.tensor(raw.data, dtype=torch.float32) / 16.0
    y = torch.tensor(raw.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    x, y = x[order], y[order]
    x_train, y_train = x[:1500], y[:1500].clone()
    hidden = torch.rand(1500, generator=torch.Generator().manual_seed(6)) < 0.35
    y_train[hidden] = IGNORE
    return x_train, y_train, x[1500:], y[1500:]


def losses(logits, target, world):
    labelled = (target != IGNORE).sum().float()
    dist.all_reduce(labelled)
    ce = F.cross_entropy(logits, target, ignore_index=IGNORE, reduction="sum")
    ce = ce * world / labelled
    z = torch.logsumexp(logits, dim=1).pow(2).sum() / BATCH
    return ce, z


def main():
    rank, world = setup()
    torch.manual_seed(17)
    x, y, x_test, y_test = load_rows()

    net = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 32), nn.GELU(), nn.Linear(32, 10))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)

    stream = torch.Generator().manual_seed(99)
    perm = torch.randperm(len(x), generator=stream)
    cursor = 0
    for step in range(STEPS):
        if cursor + BATCH > len(perm):
            perm = torch.randperm(len(x), generator=stream)
            cursor = 0
        rows = perm[cursor:cursor + BATCH][rank::world]
        cursor += BATCH

        logits = model(x[rows])
        ce, z = losses(logits, y[rows], world)
        loss = ce + Z_WEIGHT * z
        opt.zero_grad()
        loss.backward()
        opt.step()

        if step % 9 == 0:
            shown = ce.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step:3d}  cross entropy {shown.item() / world:.5f}")

    with torch.no_grad():
        out = net(x_test)
        acc = (out.argmax(1) == y_test).float().mean().item()
        log_z = torch.logsumexp(out, 1).mean().item()
    if rank == 0:
        print(f"test accuracy {acc:.4f}  mean log-partition {log_z:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
