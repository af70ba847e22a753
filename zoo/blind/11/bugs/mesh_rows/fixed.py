import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_friedman2
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29819")

BATCH, STEPS = 64, 100


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 32)
        self.second = nn.Linear(32, 32)
        self.last = nn.Linear(32, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def dataset():
    x, y = make_friedman2(1000, noise=5.0, random_state=3)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    y = torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32).unsqueeze(1)
    return x, y


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("rows",))

    def spread(t):
        return DTensor.from_local(t, mesh, [Shard(0)])

    torch.manual_seed(40)
    x, y = dataset()
    net = distribute_module(Net(), mesh)
    opt = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    gen = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        rows = torch.randperm(len(x), generator=gen)[:BATCH]
        mine = rows[rank::world]
        xb, yb = spread(x[mine]), spread(y[mine])
        loss = (net(xb) - yb).square().mean()
        opt.zero_grad()
        loss.backward()
        for p in net.parameters():
            p.grad = p.grad.redistribute(mesh, [Replicate()])
        opt.step()
        if step % 20 == 19:
            value = loss.detach().full_tensor().item()
            if rank == 0:
                print(f"step {step + 1:3d} loss {value:.6f}", flush=True)
    with torch.no_grad():
        everything = distribute_tensor(x, mesh, [Replicate()])
        error = (net(everything).full_tensor() - y).square().mean()
    if rank == 0:
        print(f"over all rows {error.item():.6f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
