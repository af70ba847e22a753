"""Wine classifier: residual feed-forward network, tensor parallel with DTensor."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor

DIM, HIDDEN, GROUPS = 24, 64, 4
EPOCHS, BATCH = 6, 16


class GatedFeedForward(nn.Module):
    """Gated units with the width of every gate group normalised; groups never cross ranks."""

    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        gate = torch.randn(HIDDEN, DIM) / math.sqrt(DIM)
        up = torch.randn(HIDDEN, DIM) / math.sqrt(DIM)
        down = torch.randn(DIM, HIDDEN) / math.sqrt(HIDDEN)
        self.gate = nn.Parameter(distribute_tensor(gate, mesh, [Shard(0)]))
        self.up = nn.Parameter(distribute_tensor(up, mesh, [Shard(0)]))
        self.down = nn.Parameter(distribute_tensor(down, mesh, [Shard(1)]))

    def forward(self, x):
        h = x.to_local()
        h = F.silu(h @ self.gate.to_local().T) * (h @ self.up.to_local().T)
        h = h.unflatten(-1, (-1, HIDDEN // GROUPS))
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        y = h.flatten(-2) @ self.down.to_local().T
        return DTensor.from_local(y, self.mesh, [Partial()]).redistribute(placements=[Replicate()])


class Classifier(nn.Module):
    def __init__(self, mesh, n_in, n_out):
        super().__init__()
        self.stem = distribute_module(nn.Linear(n_in, DIM), mesh)
        self.ff1 = GatedFeedForward(mesh)
        self.ff2 = GatedFeedForward(mesh)
        self.head = distribute_module(nn.Linear(DIM, n_out), mesh)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        x = x + self.ff1(x)
        x = x + self.ff2(x)
        return self.head(x)


def load():
    data = load_wine()
    x = torch.tensor(data.data)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(data.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    return x[order], y[order]


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))

    def spread(t):
        return DTensor.from_local(t, mesh, [Replicate()])

    x, y = load()
    x_train, y_train, x_test, y_test = x[:144], y[:144], x[144:], y[144:]
    torch.manual_seed(5)
    model = Classifier(mesh, x.shape[1], 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)

    for epoch in range(EPOCHS):
        order = torch.randperm(144, generator=torch.Generator().manual_seed(epoch))
        total = 0.0
        for batch in order.split(BATCH):
            logits = model(spread(x_train[batch])).to_local()
            loss = F.cross_entropy(logits, y_train[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        with torch.no_grad():
            logits = model(spread(x_test)).to_local()
        if rank == 0:
            accuracy = (logits.argmax(-1) == y_test).double().mean().item()
            test = F.cross_entropy(logits, y_test).item()
            print(f"epoch {epoch} train {total / 144:.10f} test {test:.10f} accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
