"""Student network fitted to a fixed teacher with Muon for the matrices, parameters sharded with FSDP2."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

N_IN, WIDTH, N_OUT = 16, 48, 8
GLOBAL_BATCH, STEPS = 64, 40


def orthogonalize(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    if tall:
        x = x.T
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(p.grad)
                buf = state["momentum"]
                buf.mul_(group["momentum"]).add_(p.grad)
                direction = p.grad + group["momentum"] * buf
                update = orthogonalize(direction.to_local())
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.to_local().add_(update, alpha=-group["lr"] * max(1.0, p.shape[0] / p.shape[1]) ** 0.5)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1 = nn.Linear(WIDTH, 2 * WIDTH)
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(N_IN, WIDTH)
        self.layers = nn.ModuleList(Residual() for _ in range(2))
        self.out = nn.Linear(WIDTH, N_OUT)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def make_teacher():
    gen = torch.Generator().manual_seed(99)
    w1 = torch.randn(N_IN, 32, generator=gen) / 4
    w2 = torch.randn(32, N_OUT, generator=gen) / 6
    return lambda x: torch.tanh(x @ w1) @ w2


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(4)
    model = Student()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    hidden = [p for n, p in model.named_parameters() if n.startswith("layers") and p.ndim == 2]
    other = [p for n, p in model.named_parameters() if not (n.startswith("layers") and p.ndim == 2)]
    optimizers = [Muon(hidden, lr=0.01, weight_decay=0.01), torch.optim.AdamW(other, lr=2e-3)]
    teacher = make_teacher()

    for step in range(STEPS):
        x = torch.randn(GLOBAL_BATCH, N_IN, generator=torch.Generator().manual_seed(step))[rank::world]
        loss = F.mse_loss(model(x), teacher(x))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        value = loss.detach().clone()
        dist.all_reduce(value)
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1} loss {value.item() / world:.10f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
