"""Residual MLP on digits, hidden dimension split over the processes."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import f1_score
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


class Gated(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.gate = nn.Linear(d, h, bias=False)
        self.up = nn.Linear(d, h)
        self.down = nn.Linear(h, d)

    def forward(self, x):
        z = self.norm(x)
        return x + self.down(F.silu(self.gate(z)) * self.up(z))


class Net(nn.Module):
    def __init__(self, d=40, h=96):
        super().__init__()
        self.inp = nn.Linear(64, d)
        self.b0, self.b1 = Gated(d, h), Gated(d, h)
        self.out = nn.Linear(d, 10)

    def forward(self, x):
        return self.out(self.b1(self.b0(self.inp(x))))


def squared_norm(g):
    n = g.norm()
    return (n.full_tensor() if isinstance(n, DTensor) else n) ** 2


def clip(params, limit):
    total = sum(squared_norm(p.grad) for p in params).sqrt().item()
    if total > limit:
        for p in params:
            p.grad.mul_(limit / total)
    return total


def run(args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(77)
    net = Net()
    plan = {}
    for b in ("b0", "b1"):
        plan.update({f"{b}.gate": ColwiseParallel(), f"{b}.up": ColwiseParallel(), f"{b}.down": RowwiseParallel()})
    parallelize_module(net, mesh, plan)
    params = list(net.parameters())
    opt = torch.optim.AdamW(params, lr=args.lr, weight_decay=0.02, foreach=False)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=args.lr, total_steps=args.steps)

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 8 - 1, torch.tensor(y)
    cut = 1500
    for step in range(args.steps):
        pick = torch.randint(cut, (args.batch,))
        noisy = x[pick] + 0.1 * torch.randn(args.batch, 64)
        loss = F.cross_entropy(net(noisy), y[pick], label_smoothing=0.05)
        opt.zero_grad()
        loss.backward()
        total = clip(params, args.clip)
        opt.step()
        sched.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"{step:3d} loss {loss.item():.6f} norm {total:.5f} lr {sched.get_last_lr()[0]:.6f}", flush=True)
    with torch.no_grad():
        guess = net(x[cut:]).argmax(1)
    if dist.get_rank() == 0:
        print("macro F1", round(f1_score(y[cut:], guess, average="macro"), 5))
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=45)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--clip", type=float, default=1.0)
    run(ap.parse_args())
