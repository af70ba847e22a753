import copy
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from torch.nn.parallel import DistributedDataParallel as DDP

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29805")

RATES = torch.logspace(-1.0, 1.8, 36).tolist()


def get_data():
    data = load_breast_cancer()
    x = torch.tensor(data.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(data.target, dtype=torch.float32)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    x, y = x[order], y[order]
    return x[:448], y[:448], x[448:], y[448:]


def loss_of(net, x, y):
    return F.binary_cross_entropy_with_logits(net(x).squeeze(1), y)


def find_rate(net, x, y, tries=6):
    """A few plain steps for every rate on a copy; the rate which gets deepest, halved, is taken."""
    best, chosen = float("inf"), RATES[0]
    for rate in RATES:
        trial = copy.deepcopy(net)
        params = list(trial.parameters())
        for _ in range(tries):
            grads = torch.autograd.grad(loss_of(trial, x, y), params)
            with torch.no_grad():
                for p, g in zip(params, grads):
                    p -= rate * g
        with torch.no_grad():
            reached = loss_of(trial, x, y).item()
        if reached < best:
            best, chosen = reached, rate
    return chosen / 2


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, xt, yt = get_data()
    mine, labels = x[rank::world], y[rank::world]
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(30, 24), nn.Tanh(), nn.Linear(24, 1))
    rate = find_rate(net, x, y)
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.5)
    if rank == 0:
        print(f"learning rate {rate:.4f}", flush=True)
    for step in range(80):
        opt.zero_grad()
        loss = loss_of(model, mine, labels)
        loss.backward()
        opt.step()
        if step % 20 == 19:
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1}: {mean.item():.6f}", flush=True)
    with torch.no_grad():
        test = loss_of(model.module, xt, yt)
    if rank == 0:
        print(f"test loss {test.item():.6f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
