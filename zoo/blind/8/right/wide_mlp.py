import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.w_in = nn.Linear(dim, hidden)
        self.w_out = nn.Linear(hidden, dim)

    def forward(self, x):
        return x + self.w_out(F.silu(self.w_in(self.norm(x))))


class Model(nn.Module):
    def __init__(self, dim=32, hidden=128, depth=2):
        super().__init__()
        self.stem = nn.Linear(20, dim)
        self.layers = nn.ModuleList(FeedForward(dim, hidden) for _ in range(depth))
        self.head = nn.Linear(dim, 6)

    def forward(self, x):
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main(steps=80, batch=64):
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29850")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))

    x, y = make_classification(1600, n_features=20, n_informative=12, n_classes=6, random_state=21)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)

    torch.manual_seed(80)
    model = Model()
    for layer in model.layers:
        parallelize_module(layer, mesh, {"w_in": ColwiseParallel(), "w_out": RowwiseParallel()})
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, foreach=False)

    for step in range(1, steps + 1):
        rows = torch.randint(1400, (batch,))
        loss = F.cross_entropy(model(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 16 == 0 and rank == 0:
            print(f"step {step} loss {loss.item():.5f}")

    with torch.no_grad():
        logits = model(x[1400:])
    if rank == 0:
        print(f"test accuracy {(logits.argmax(1) == y[1400:]).float().mean().item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
