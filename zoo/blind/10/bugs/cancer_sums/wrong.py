"""Breast cancer, logistic net, gradients exchanged by hand."""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler

GLOBAL_BATCH = 128
ACCUM = 4
STEPS = 80


def setup():
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29703")
    rank = int(os.environ.setdefault("RANK", "0"))
    world = int(os.environ.setdefault("WORLD_SIZE", "1"))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    return rank, world


def load():
    x, y = load_breast_cancer(return_X_y=True)
    x = StandardScaler().fit_transform(x)
    return torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.float32))


def build():
    torch.manual_seed(21)
    return torch.nn.Sequential(
        torch.nn.Linear(30, 20),
        torch.nn.Tanh(),
        torch.nn.Linear(20, 1),
    )


def add_over_processes(model):
    for p in model.parameters():
        dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)


def train_step(model, optimizer, x, y, rows, world):
    optimizer.zero_grad()
    seen = torch.zeros(())
    for part in rows.chunk(ACCUM):
        logits = model(x[part]).squeeze(1)
        loss = F.binary_cross_entropy_with_logits(logits, y[part])
        loss = loss / (ACCUM * world)
        loss.backward()
        seen += loss.detach()
        add_over_processes(model)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
    optimizer.step()
    dist.all_reduce(seen)
    return seen.item(), norm.item()


def main():
    rank, world = setup()
    x, y = load()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8)
    rng = np.random.default_rng(8)
    for step in range(STEPS):
        rows = torch.from_numpy(rng.choice(len(x), GLOBAL_BATCH, replace=False))
        loss, norm = train_step(model, optimizer, x, y, rows[rank::world], world)
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1}: loss {loss:.5f}, gradient {norm:.4f}", flush=True)
    with torch.no_grad():
        hits = ((model(x).squeeze(1) > 0) == (y > 0.5)).float().mean().item()
    if rank == 0:
        print(f"accuracy {hits:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


main()
