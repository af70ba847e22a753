"""Unrolls the swiss roll with a sharded network (fully_shard), momentum SGD and cosine decay."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_swiss_roll
from torch.distributed.fsdp import fully_shard

STEPS = 60
BATCH = 64


def setup():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29715")
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def roll():
    points, along = make_swiss_roll(1024, noise=0.1, random_state=2)
    points = torch.tensor(points / 10, dtype=torch.float32)
    along = torch.tensor(along, dtype=torch.float32)
    return points, ((along - along.mean()) / along.std()).unsqueeze(1)


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc = nn.Linear(width, width)

    def forward(self, x):
        return x + torch.relu(self.fc(self.norm(x)))


class Net(nn.Module):
    def __init__(self, width=32, depth=2):
        super().__init__()
        self.inp = nn.Linear(3, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.out = nn.Linear(width, 1)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def shard(net):
    for layer in net.layers:
        fully_shard(layer)
    fully_shard(net)
    for module in [*net.layers, net]:
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
    return net


def main():
    rank, world = setup()
    points, along = roll()
    torch.manual_seed(19)
    net = shard(Net())
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, STEPS)
    g = torch.Generator().manual_seed(23)
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(points), (BATCH,), generator=g)[rank::world]
        loss = nn.functional.mse_loss(net(points[rows]), along[rows])
        loss.backward()
        opt.step()
        opt.zero_grad()
        sched.step()
        if step % 15 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step}: loss {mean.item() / world:.6f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
