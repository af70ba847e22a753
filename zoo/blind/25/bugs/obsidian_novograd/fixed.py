"""NovoGrad (layer-wise second moment) with FSDP2 on the digits.

The optimizer keeps one scalar v per tensor, the running mean of the squared norm of its gradient.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class NovoGrad(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, betas=(0.9, 0.5), weight_decay=1e-3, eps=1e-8):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay, eps=eps))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                weight, grad = p.to_local(), p.grad.to_local()
                square = grad.pow(2).sum()
                dist.all_reduce(square)
                state = self.state[p]
                if not state:
                    state["v"] = square.clone()
                    state["m"] = torch.zeros_like(weight)
                else:
                    state["v"].mul_(b2).add_(square, alpha=1 - b2)
                update = grad / (state["v"].sqrt() + group["eps"]) + group["weight_decay"] * weight
                state["m"].mul_(b1).add_(update)
                weight.add_(state["m"], alpha=-group["lr"])


class Digits(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(2))
        self.last = nn.Linear(width, 12)

    def forward(self, x):
        x = F.relu(self.first(x))
        for block in self.blocks:
            x = x + F.relu(block(x))
        return self.last(x)


def setup():
    if "RANK" not in os.environ:
        os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"})
    dist.init_process_group("gloo")
    return init_device_mesh("cpu", (dist.get_world_size(),))


def main(steps=36, batch=96):
    mesh = setup()
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32) / 8 - 1
    y = torch.tensor(y)
    train_x, train_y, test_x, test_y = x[:1500], y[:1500], x[1500:], y[1500:]

    torch.manual_seed(99)
    model = Digits()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = NovoGrad(model.parameters())

    gen = torch.Generator().manual_seed(2)
    for step in range(steps):
        idx = torch.randperm(len(train_y), generator=gen)[:batch][rank::world]
        loss = F.cross_entropy(model(train_x[idx]), train_y[idx])
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step % 9 == 8:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1:3d} loss {mean.item() / world:.5f}", flush=True)

    with torch.no_grad():
        logits = model(test_x)
        nll = F.cross_entropy(logits, test_y).item()
        acc = (logits.argmax(1) == test_y).float().mean().item()
    if rank == 0:
        print(f"test nll {nll:.5f} accuracy {acc:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
