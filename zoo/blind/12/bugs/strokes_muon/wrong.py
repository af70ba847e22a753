"""Digits with an MLP under fully_shard; hidden matrices are trained by Muon, all other parameters by SGD."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def newton_schulz(g, steps=5):
    x = g / (g.norm() + 1e-7)
    tall = x.size(0) > x.size(1)
    x = x.T if tall else x
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            for p in group["params"]:
                if "buf" not in self.state[p]:
                    self.state[p]["buf"] = torch.zeros_like(p)
                buf = self.state[p]["buf"]
                buf.mul_(group["momentum"]).add_(p.grad)
                update = newton_schulz(buf.to_local())
                p.to_local().sub_(update, alpha=group["lr"])


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(64, 48)
        self.hidden = nn.ModuleList(nn.Linear(48, 48, bias=False) for _ in range(3))
        self.out = nn.Linear(48, 10)

    def forward(self, x):
        x = torch.tanh(self.inp(x))
        for layer in self.hidden:
            x = x + torch.tanh(layer(x))
        return self.out(x)


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" not in os.environ:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(42)
    net = MLP()
    for layer in net.hidden:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    inner = [layer.weight for layer in net.hidden]
    rest = [p for n, p in net.named_parameters() if not n.startswith("hidden")]
    optimizers = [Muon(inner, lr=0.02), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]

    digits = load_digits()
    x, y = torch.tensor(digits.data) / 16, torch.tensor(digits.target)
    draw = torch.Generator().manual_seed(6)
    for step in range(40):
        rows = torch.randint(0, 1500, (64,), generator=draw)[rank::world]
        loss = F.cross_entropy(net(x[rows]), y[rows])
        loss.backward()
        for opt in optimizers:
            opt.step()
            opt.zero_grad()
        if step % 10 == 9:
            value = loss.detach().clone()
            dist.all_reduce(value)
            if rank == 0:
                print(f"step {step + 1} loss {value.item() / world:.6f}")

    with torch.no_grad():
        accuracy = (net(x[1500:]).argmax(1) == y[1500:]).double().mean()
    if rank == 0:
        print(f"test accuracy {accuracy.item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
