"""Breast cancer, logistic regression with a hidden layer; a missed malignant case costs more."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

COSTS = torch.tensor([6.0, 1.0])  # malignant, benign
BATCH = 48
STEPS = 60


def connect():
    if os.environ.get("RANK") is None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def table():
    d = load_breast_cancer()
    x = torch.tensor(d.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    return x, torch.tensor(d.target)


def over_all(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return value


def batches(n, rank, world):
    g = torch.Generator().manual_seed(2024)
    while True:
        order = torch.randperm(n, generator=g)
        for k in range(0, n - BATCH + 1, BATCH):
            yield order[k:k + BATCH][rank::world]


def criterion(logits, y, world):
    return F.cross_entropy(logits, y, weight=COSTS)


def main():
    rank, world = connect()
    x, y = table()
    train_x, train_y, test_x, test_y = x[:480], y[:480], x[480:], y[480:]
    torch.manual_seed(9)
    net = DDP(nn.Sequential(nn.Linear(30, 16), nn.Tanh(), nn.Linear(16, 2)))
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.8, weight_decay=1e-3)
    source = batches(len(train_x), rank, world)
    for step in range(1, STEPS + 1):
        rows = next(source)
        loss = criterion(net(train_x[rows]), train_y[rows], world)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            shown = over_all(loss) / world
            if rank == 0:
                print(f"{step:3d} {shown.item():.5f}")

    with torch.no_grad():
        mine = slice(rank, None, world)
        out = net.module(test_x[mine])
        cost = (F.cross_entropy(out, test_y[mine], reduction="none") * COSTS[test_y[mine]]).sum()
        missed = ((out.argmax(1) == 1) & (test_y[mine] == 0)).sum()
    cost, missed = over_all(cost), over_all(missed)
    if rank == 0:
        print(f"test cost {cost.item() / len(test_x):.5f}, missed {missed.item()}")
    time.sleep(0.3)
    dist.destroy_process_group()


main()
