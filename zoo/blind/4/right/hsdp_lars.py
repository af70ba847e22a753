"""Digits classifier, hybrid sharding, layer-wise adaptive rates."""
import argparse
import math
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor


def whole(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


class Lars(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9, decay=1e-3, trust=0.02):
        super().__init__(params, dict(lr=lr, momentum=momentum, decay=decay, trust=trust))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad
                d = g + group["decay"] * p if p.ndim > 1 else g
                rate = 1.0
                if p.ndim > 1:
                    rate = group["trust"] * (whole(p.norm()) / (whole(d.norm()) + 1e-9)).item()
                else:
                    rate = group["trust"]
                buf = self.state[p].setdefault("v", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(d, alpha=rate * group["lr"])
                p.sub_(buf)


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.a = nn.Linear(d, 2 * d)
        self.b = nn.Linear(2 * d, d)

    def forward(self, x):
        return x + self.b(F.gelu(self.a(self.norm(x))))


class Net(nn.Module):
    def __init__(self, d=32, depth=3):
        super().__init__()
        self.stem = nn.Linear(64, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.head = nn.Linear(d, 10)

    def forward(self, x):
        x = self.stem(x)
        for b in self.blocks:
            x = b(x)
        return self.head(x)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=0.7)
    ap.add_argument("--shard", type=int, default=1, help="processes that share one copy of the weights")
    ap.add_argument("--clip", type=float, default=1.5)
    a = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    mesh = init_device_mesh("cpu", (world // a.shard, a.shard), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(21)
    net = Net()
    for b in net.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(net, mesh=mesh)
    opt = Lars(net.parameters(), lr=a.lr)

    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32) / 16
    y = torch.tensor(y)
    train_x, train_y, test_x, test_y = x[:1400], y[:1400], x[1400:], y[1400:]
    gen = torch.Generator().manual_seed(5)
    for step in range(a.steps):
        for group in opt.param_groups:
            group["lr"] = a.lr * 0.5 * (1 + math.cos(math.pi * step / a.steps))
        pick = torch.randint(0, len(train_x), (a.batch,), generator=gen).chunk(world)[rank]
        loss = F.cross_entropy(net(train_x[pick]), train_y[pick])
        opt.zero_grad()
        loss.backward()
        norm = whole(nn.utils.clip_grad_norm_(net.parameters(), a.clip))
        opt.step()
        if step % 10 == 9:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step + 1} loss {mean / world:.6f} norm {norm:.5f}", flush=True)
    with torch.no_grad():
        hits = (net(test_x).argmax(1) == test_y).float().mean()
    if rank == 0:
        print(f"accuracy {hits:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
