import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_friedman1
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29816")

BATCH = 64


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def build(mesh, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 24), Block(24), Block(24), nn.Linear(24, 4))
    for layer in model:
        if isinstance(layer, Block):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def data():
    x, y = make_friedman1(800, 8, noise=0.3, random_state=2)
    y = (y - y.mean()) / y.std()
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)
    return x, torch.stack([y, y ** 2, y.abs(), y.sin()], 1)


def fit(model, x, y, first, last, rank, world):
    opt = torch.optim.SGD(model.parameters(), lr=0.03)
    for step in range(first, last):
        g = torch.Generator().manual_seed(step)
        rows = torch.randint(len(x), (BATCH,), generator=g)[rank::world]
        loss = F.mse_loss(model(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 15 == 14:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1}: {mean.item() / world:.5f}", flush=True)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    x, y = data()

    model = build(mesh, seed=1)
    fit(model, x, y, 0, 45, rank, world)
    path = f"{folder[0]}/weights.pt"
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()

    # the second job of the night goes on where the first one stopped
    model = build(mesh, seed=2)
    model.load_state_dict(torch.load(path, weights_only=False))
    fit(model, x, y, 45, 90, rank, world)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
