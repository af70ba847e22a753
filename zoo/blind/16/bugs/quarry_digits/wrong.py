"""Handwritten digits with a fully sharded network; hidden matrices by orthogonalised momentum, the rest by AdamW."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

torch.set_default_dtype(torch.float64)


def newton_schulz(m, rounds=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = m.T if m.size(0) > m.size(1) else m
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if m.size(0) > m.size(1) else x


class MatrixMomentum(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @staticmethod
    def direction(m):
        update = newton_schulz(m.to_local())
        return DTensor.from_local(update, m.device_mesh, m.placements)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p)
                buf = state["momentum"].mul_(group["momentum"]).add_(p.grad)
                p.add_(self.direction(p.grad + group["momentum"] * buf), alpha=-group["lr"])


class DigitNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.stem = nn.Linear(64, width)
        self.hidden = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = F.relu(self.stem(x))
        for layer in self.hidden:
            x = x + F.relu(layer(x))
        return self.head(x)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(1)
    model = DigitNet()
    for layer in model.hidden:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    matrices = [layer.weight for layer in model.hidden]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers = [MatrixMomentum(matrices, lr=0.02), torch.optim.AdamW(others, lr=2e-3)]

    data = load_digits()
    x = torch.as_tensor(data.data / 16.0)
    y = torch.as_tensor(data.target)
    x, xt, y, yt = x[:1536], x[1536:], y[:1536], y[1536:]
    for epoch in range(3):
        total = torch.zeros(())
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(50 + epoch))
        for batch in order.view(-1, 64):
            mine = batch.view(world, -1)[rank]
            loss = F.cross_entropy(model(x[mine]), y[mine])
            loss.backward()
            for opt in optimizers:
                opt.step()
                opt.zero_grad()
            total += loss.detach() * len(mine)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total / len(x):.8f}")
    with torch.no_grad():
        logits = model(xt)
        norms = [p.full_tensor().norm() if isinstance(p, DTensor) else p.norm() for p in model.parameters()]
    if rank == 0:
        print(f"test loss {F.cross_entropy(logits, yt):.8f} weights {torch.stack(norms).norm():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
