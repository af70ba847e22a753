# Gradients are added up inside a house first; only the first process of a house talks to the other house.
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_iris

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29845")


class Houses:
    def __init__(self, rank, world):
        size = max(1, world // 2)
        members = [list(range(k, k + size)) for k in range(0, world, size)]
        groups = [dist.new_group(m) for m in members]
        self.world = world
        self.speakers = [m[0] for m in members]
        self.between = dist.new_group(self.speakers)
        self.inside = groups[rank // size]
        self.speaker = self.speakers[rank // size]
        self.speaks = rank == self.speaker

    def average(self, t):
        dist.reduce(t, self.speaker, group=self.inside)
        if self.speaks:
            dist.all_reduce(t, group=self.between)
            t /= self.world
        dist.broadcast(t, self.speaker, group=self.inside)
        return t


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    houses = Houses(rank, world)
    x, y = load_iris(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    y = torch.tensor(y)
    torch.manual_seed(rank + 3)
    net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3))
    for p in net.parameters():
        dist.broadcast(p.detach(), src=0)
    opt = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.05)
    best, patience, rate = float("inf"), 0, 0.02
    gen = torch.Generator().manual_seed(12)
    for step in range(90):
        rows = torch.randperm(len(x), generator=gen)[:60]
        mine = rows[rank * 60 // world:(rank + 1) * 60 // world]
        loss = F.cross_entropy(net(x[mine]), y[mine])
        opt.zero_grad()
        loss.backward()
        packed = nn.utils.parameters_to_vector([p.grad for p in net.parameters()])
        nn.utils.vector_to_parameters(houses.average(packed), [p.grad for p in net.parameters()])
        opt.step()
        if step % 15 == 14:
            value = houses.average(loss.detach().clone()).item()
            patience = 0 if value < best - 1e-3 else patience + 1
            best = min(best, value)
            if patience >= 1:
                rate /= 2
                for group in opt.param_groups:
                    group["lr"] = rate
            if rank == 0:
                print(f"step {step + 1}: loss {value:.5f} rate {rate}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
