"""Digits in two stages: an autoencoder first, then a classifier on top of its encoder."""
import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import cross_val_score
from sklearn.neighbors import KNeighborsClassifier

BATCH, STEPS = 64, 50


def encoder():
    return nn.Sequential(nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 12))


def average(params):
    for p in params:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


def batches(total, seed, rank, world):
    g = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        yield torch.randint(total, (BATCH,), generator=g)[rank::world]


def first_stage(x, y, path, rank, world):
    torch.manual_seed(0)
    enc, dec = encoder(), nn.Linear(12, 64)
    params = [*enc.parameters(), *dec.parameters()]
    opt = torch.optim.Adam(params, lr=3e-3)
    for rows in batches(len(x), 1, rank, world):
        loss = F.mse_loss(dec(F.relu(enc(x[rows]))), x[rows])
        opt.zero_grad()
        loss.backward()
        average(params)
        opt.step()
    if rank == 0:
        with torch.no_grad():
            codes = enc(x).numpy()
        score = cross_val_score(KNeighborsClassifier(5), codes, y.numpy(), cv=8).mean()
        print(f"codes: neighbours agree {score:.4f}", flush=True)
        torch.save(enc.state_dict(), path)
    dist.barrier()


def second_stage(x, y, path, rank, world):
    torch.manual_seed(7)
    enc, head = encoder(), nn.Linear(12, 10)
    if os.path.exists(path):
        enc.load_state_dict(torch.load(path))
    params = [*enc.parameters(), *head.parameters()]
    opt = torch.optim.SGD(params, lr=0.05, momentum=0.9)
    for rows in batches(len(x), 2, rank, world):
        loss = F.cross_entropy(head(F.relu(enc(x[rows]))), y[rows])
        opt.zero_grad()
        loss.backward()
        average(params)
        opt.step()
    with torch.no_grad():
        loss = F.cross_entropy(head(F.relu(enc(x))), y).item()
    if rank == 0:
        print(f"classifier: loss {loss:.5f}", flush=True)


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29720")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "encoder.pt")
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    first_stage(x, y, path, rank, world)
    second_stage(x, y, path, rank, world)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder[0])
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
