"""Muon for the matrices, AdamW for the rest, on a fully sharded regression network."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from sklearn.datasets import make_friedman1

torch.set_default_dtype(torch.float64)


def newton_schulz(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-12)
    flip = x.shape[0] > x.shape[1]
    if flip:
        x = x.mT
    for _ in range(steps):
        s = x @ x.mT
        x = a * x + (b * s + c * s @ s) @ x
    return x.mT if flip else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["buffer"] = torch.zeros_like(p)
                buffer = state["buffer"]
                buffer.mul_(group["momentum"]).add_(p.grad)
                update = p.grad.add(buffer, alpha=group["momentum"])
                ortho = newton_schulz(update.to_local())
                ortho = DTensor.from_local(ortho, p.device_mesh, p.placements)
                scale = max(1.0, p.shape[0] / p.shape[1]) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(ortho, alpha=-group["lr"] * scale)


class Net(nn.Module):
    def __init__(self, features, width=32, depth=3):
        super().__init__()
        self.inp = nn.Linear(features, width)
        self.hidden = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, 4)
        self.mix = nn.Parameter(torch.ones(4) / 4)

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        for layer in self.hidden:
            x = x + torch.relu(layer(x))
        return self.out(x) @ self.mix


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    x, y = make_friedman1(n_samples=640, n_features=8, noise=0.3, random_state=7)
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    y = (y - y.mean()) / y.std()
    train_x, train_y, test_x, test_y = x[:512], y[:512], x[512:], y[512:]

    torch.manual_seed(21)
    net = Net(x.shape[1])
    for layer in net.hidden:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    matrices = [m.weight for m in net.hidden]
    rest = [p for n, p in net.named_parameters() if not (n.startswith("hidden") and p.ndim == 2)]
    optimizers = [Muon(matrices), torch.optim.AdamW(rest, lr=5e-3)]

    batch = 64
    for epoch in range(4):
        perm = torch.randperm(512, generator=torch.Generator().manual_seed(epoch))
        total = torch.zeros(())
        for chunk in perm.split(batch):
            idx = chunk.chunk(world)[rank]
            loss = (net(train_x[idx]) - train_y[idx]).pow(2).mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            total += loss.detach()
        dist.all_reduce(total)
        with torch.no_grad():
            error = (net(test_x) - test_y).pow(2).mean()
        if rank == 0:
            print(f"epoch {epoch}  train {total.item() / world / 8:.10f}  test {error.item():.10f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
