"""A small switch layer: eight experts spread over the processes, one expert per row."""
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

EXPERTS, DIM, BATCH, STEPS = 8, 32, 64, 100


class Switch(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.rank = rank
        self.first = rank * (EXPERTS // world)
        self.router = nn.Linear(DIM, EXPERTS)
        everyone = [nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM)) for _ in range(EXPERTS)]
        self.experts = nn.ModuleList(everyone[self.first:self.first + EXPERTS // world])

    def forward(self, h):
        probs = self.router(h).softmax(-1)
        gate, choice = probs.max(-1)
        rows = torch.cat(dist_fn.all_gather(h))
        gates = torch.cat(dist_fn.all_gather(gate))
        choices = [torch.empty_like(choice) for _ in range(dist.get_world_size())]
        dist.all_gather(choices, choice)
        choices = torch.cat(choices)

        out = torch.zeros_like(rows)
        for i, expert in enumerate(self.experts):
            hit = (choices == self.first + i).float()[:, None]
            out = out + hit * gates[:, None] * expert(rows)
        out = dist_fn.all_reduce(out)
        return h + out[self.rank * len(h):(self.rank + 1) * len(h)]


class Net(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.stem = nn.Linear(64, DIM)
        self.head = nn.Linear(DIM, 10)
        self.switch = Switch(rank, world)

    def forward(self, x):
        return self.head(self.switch(torch.relu(self.stem(x))))


def reduce_gradients(net, world):
    for name, p in net.named_parameters():
        if ".experts." in name:
            continue        # the rows of all processes have been here already
        dist.all_reduce(p.grad)
        p.grad /= world


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29813")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)

    torch.manual_seed(7)
    net = Net(rank, world)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    local = BATCH // world
    gen = torch.Generator().manual_seed(1)
    for step in range(1, STEPS + 1):
        rows = torch.randperm(1500, generator=gen)[:BATCH]
        mine = rows[rank * local:(rank + 1) * local]
        loss = F.cross_entropy(net(x[mine]), y[mine])
        opt.zero_grad()
        loss.backward()
        reduce_gradients(net, world)
        opt.step()
        if step % 25 == 0:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step} loss {total.item() / world:.5f}")

    test = torch.arange(1500, 1796)
    mine = test[rank * len(test) // world:(rank + 1) * len(test) // world]
    with torch.no_grad():
        hits = (net(x[mine]).argmax(1) == y[mine]).sum().float()
    dist.all_reduce(hits)
    if rank == 0:
        print(f"test accuracy {hits.item() / len(test):.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
