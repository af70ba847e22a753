"""Feed-forward classifier with tensor parallel blocks (parallelize_module); all processes see the same batch."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class FeedForward(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.w1 = nn.Linear(dim, hidden)
        self.w2 = nn.Linear(hidden, dim)
        self.w3 = nn.Linear(dim, hidden)

    def forward(self, x):
        h = self.norm(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(64, 40)
        self.ff = nn.ModuleList(FeedForward(40, 64) for _ in range(2))
        self.out = nn.Linear(40, 10)

    def forward(self, x):
        x = self.inp(x)
        for f in self.ff:
            x = f(x)
        return self.out(x)


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29712").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(11)
    model = Model()
    for f in model.ff:
        parallelize_module(f, mesh, {"w1": ColwiseParallel(), "w3": ColwiseParallel(), "w2": RowwiseParallel()})
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, foreach=False)

    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    gen = torch.Generator().manual_seed(1)
    for step in range(1, 31):
        ids = torch.randint(1500, (48,), generator=gen)
        loss = F.cross_entropy(model(x[ids]), y[ids])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and step % 10 == 0:
            print(f"step {step} loss {loss.item():.5f}")
    with torch.no_grad():
        acc = (model(x[1500:]).argmax(1) == y[1500:]).float().mean()
    if rank == 0:
        print(f"held out {acc.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
