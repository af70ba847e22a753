"""Digits with an MLP under fully_shard; hidden matrices are trained with Muon, the rest with AdamW."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor


def newton_schulz(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = g.size(0) > g.size(1)
    x = g.T if tall else g
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if tall else x


def orthogonal(m: DTensor) -> DTensor:
    update = newton_schulz(m.full_tensor())
    return distribute_tensor(update, m.device_mesh, m.placements)


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if "buffer" not in state:
                    state["buffer"] = torch.zeros_like(p)
                buf = state["buffer"]
                buf.mul_(group["momentum"]).add_(p.grad)
                look = p.grad.add(buf, alpha=group["momentum"])
                scale = max(1.0, p.size(0) / p.size(1)) ** 0.5
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(orthogonal(look), alpha=-group["lr"] * scale)


class Layer(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x):
        return x + self.down(F.relu(self.up(self.norm(x))).square())


class Classifier(nn.Module):
    def __init__(self, width=32, hidden=64, depth=2):
        super().__init__()
        self.inp = nn.Linear(64, width)
        self.layers = nn.ModuleList([Layer(width, hidden) for _ in range(depth)])
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main():
    torch.set_default_dtype(torch.float64)
    if "WORLD_SIZE" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    digits = load_digits()
    x, y = torch.tensor(digits.data) / 16.0, torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1280], order[1280:]

    torch.manual_seed(1)
    model = Classifier()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    hidden = [p for n, p in model.named_parameters() if n.startswith("layers") and p.ndim == 2]
    others = [p for n, p in model.named_parameters() if not (n.startswith("layers") and p.ndim == 2)]
    opts = [Muon(hidden, lr=0.02, weight_decay=0.01), torch.optim.AdamW(others, lr=3e-3)]

    for epoch in range(2):
        order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(50 + epoch))]
        for batch in order.split(128):
            mine = batch.chunk(world)[rank]
            loss = F.cross_entropy(model(x[mine]), y[mine])
            loss.backward()
            for opt in opts:
                opt.step()
                opt.zero_grad()
        with torch.no_grad():
            out = model(x[test])
            ce, acc = F.cross_entropy(out, y[test]), (out.argmax(1) == y[test]).double().mean()
        if rank == 0:
            print(f"epoch {epoch}: test loss {ce.item():.6f} accuracy {acc.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
