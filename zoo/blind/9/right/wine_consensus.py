"""Momentum SGD where every process steps on its own gradient and the weights are averaged after each step."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from sklearn.preprocessing import StandardScaler

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30461")

STEPS, BATCH = 120, 48


@torch.no_grad()
def consensus(params, world):
    flat = nn.utils.parameters_to_vector(params)
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / world, params)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    wine = load_wine()
    x = torch.tensor(StandardScaler().fit_transform(wine.data), dtype=torch.float32)
    y = torch.tensor(wine.target)
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(13, 24), nn.Tanh(), nn.Linear(24, 3))
    params = list(net.parameters())
    opt = torch.optim.SGD(params, lr=0.05, momentum=0.9, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    draw = torch.Generator().manual_seed(6)

    for step in range(STEPS):
        rows = torch.randperm(len(x), generator=draw)[:BATCH][rank::world]
        loss = F.cross_entropy(net(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        consensus(params, world)
        sched.step()
        if step % 30 == 29:
            with torch.no_grad():
                whole = F.cross_entropy(net(x), y).item()
            if rank == 0:
                print(f"step {step + 1} loss {whole:.6f}")

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
