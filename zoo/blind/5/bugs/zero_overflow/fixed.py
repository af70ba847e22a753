"""Digits in half precision on the CPU; every process keeps the optimizer state of one slice of the flat parameters."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn


class LossScale:
    def __init__(self, value, every):
        self.value, self.every, self.clean = value, every, 0

    def update(self, overflow):
        if overflow:
            self.value, self.clean = self.value / 2, 0
            return
        self.clean += 1
        if self.clean == self.every:
            self.value, self.clean = self.value * 2, 0


class SlicedAdam:
    """Adam over one flat fp32 vector: gradients are reduce-scattered in half precision, weights are gathered."""

    def __init__(self, module, lr, betas=(0.9, 0.98), eps=1e-8):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.params = list(module.parameters())
        self.lr, self.betas, self.eps, self.t = lr, betas, eps, 0
        used = sum(p.numel() for p in self.params)
        self.size = -(-used // self.world)
        self.flat = torch.zeros(self.size * self.world)
        at = 0
        for p in self.params:
            view = self.flat[at:at + p.numel()]
            view.copy_(p.detach().flatten())
            p.data = view.view_as(p)
            at += p.numel()
        self.slice = slice(self.rank * self.size, (self.rank + 1) * self.size)
        self.m, self.v = torch.zeros(self.size), torch.zeros(self.size)

    @torch.no_grad()
    def step(self, scale):
        wire = torch.zeros(len(self.flat), dtype=torch.float16)
        local = torch.cat([p.grad.flatten() for p in self.params])
        wire[:len(local)] = local.half()
        mine = torch.empty(self.size, dtype=torch.float16)
        dist.reduce_scatter_tensor(mine, wire)
        overflow = (~torch.isfinite(mine)).any().float()
        dist.all_reduce(overflow, op=dist.ReduceOp.MAX)
        if not overflow:
            g = mine.float() / scale.value
            self.t += 1
            self.m.lerp_(g, 1 - self.betas[0])
            self.v.mul_(self.betas[1]).addcmul_(g, g, value=1 - self.betas[1])
            m = self.m / (1 - self.betas[0] ** self.t)
            v = self.v / (1 - self.betas[1] ** self.t)
            self.flat[self.slice] -= self.lr * m / (v.sqrt() + self.eps)
        dist.all_gather_into_tensor(self.flat, self.flat[self.slice].clone())
        scale.update(bool(overflow))
        return bool(overflow)


def net():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=48)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--scale", type=float, default=2.0 ** 15)
    ap.add_argument("--grow-every", type=int, default=6)
    a = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    torch.manual_seed(4)
    model = net()
    opt, scale = SlicedAdam(model, a.lr), LossScale(a.scale, a.grow_every)

    skipped = 0
    for step in range(a.steps):
        g = torch.Generator().manual_seed(step)
        rows = torch.randint(0, 1500, (a.batch,), generator=g)[rank::world]
        with torch.autocast("cpu", dtype=torch.float16):
            logits = model(x[rows])
        loss = F.cross_entropy(logits.float(), y[rows], reduction="sum") / a.batch
        model.zero_grad(set_to_none=False)
        (loss * scale.value).backward()
        skipped += opt.step(scale)
        if rank == 0 and step % 12 == 11:
            print(f"step {step + 1}: loss {loss.item() * world:.3f}, scale {scale.value:g}, {skipped} skipped")

    with torch.no_grad():
        accuracy = (model(x[1500:]).argmax(1) == y[1500:]).float().mean().item()
    if rank == 0:
        print(f"held-out accuracy {accuracy:.3f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
