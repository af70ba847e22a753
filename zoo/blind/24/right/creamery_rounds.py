#!/usr/bin/env python
"""Federated averaging: eight creameries of very different size predict milk fat.

A process simulates creameries rank, rank+world, ...; each trains its own copy
locally and the server averages the *changes*, weighted by herd size, with momentum."""
import os, time
import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

ROUNDS, LOCAL_STEPS, CREAMERIES = 3, 2, 8


def herd(i):
    r = np.random.default_rng(500 + i)
    n = int(20 + 30 * i * r.random())
    x = r.normal(loc=0.2 * i, size=(n, 6))
    y = x @ np.array([0.5, -0.3, 0.2, 0.0, 0.8, -0.1]) + 0.1 * i + 0.05 * r.normal(size=n)
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)[:, None]


def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.SiLU(), torch.nn.Linear(12, 1))


def local_training(weights, i, round_no):
    x, y = herd(i)
    model = build()
    vector_to_parameters(weights, model.parameters())
    opt = torch.optim.SGD(model.parameters(), lr=0.05 / (1 + 0.5 * round_no))
    order = np.random.default_rng((round_no, i)).permutation(len(x))
    for chunk in np.array_split(order, LOCAL_STEPS):
        opt.zero_grad()
        loss = (model(x[chunk]) - y[chunk]).pow(2).mean()
        loss.backward()
        opt.step()
    return parameters_to_vector(model.parameters()).detach() - weights, len(x), loss.item()


world = int(os.getenv("WORLD_SIZE", "1"))
rank = int(os.getenv("RANK", "0"))
if world > 1:
    dist.init_process_group("gloo", rank=rank, world_size=world)

server = parameters_to_vector(build().parameters()).detach().clone()
velocity = torch.zeros_like(server)
for rnd in range(ROUNDS):
    # creameries that answer in this round: one of them is always on holiday
    away = int(np.random.default_rng(rnd).integers(CREAMERIES))
    pot = torch.zeros(server.numel() + 2, dtype=torch.float64)
    for c in range(rank, CREAMERIES, world):
        if c == away:
            continue
        delta, cows, loss = local_training(server.clone(), c, rnd)
        pot[:-2] += cows * delta.double()
        pot[-2] += cows * loss
        pot[-1] += cows
    if world > 1:
        dist.all_reduce(pot)
    velocity = 0.6 * velocity + (pot[:-2] / pot[-1]).float()
    server = server + velocity
    if rank == 0:
        print(f"round {rnd}: creamery {away} away, {int(pot[-1])} cows, loss {pot[-2] / pot[-1]:.5f}")

if rank == 0:
    judge = build()
    vector_to_parameters(server, judge.parameters())
    with torch.no_grad():
        errs = [(judge(herd(c)[0]) - herd(c)[1]).abs().mean().item() for c in range(CREAMERIES)]
    print("mean abs error by creamery: " + " ".join(f"{e:.4f}" for e in errs), flush=True)
time.sleep(0.3)
if world > 1:
    dist.destroy_process_group()
