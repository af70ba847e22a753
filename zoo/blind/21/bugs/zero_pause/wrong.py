"""Tabular classifier with optimizer states sharded over the processes; the run is
stopped after some epochs and continued from its checkpoint."""
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from sklearn.preprocessing import StandardScaler

torch.set_default_dtype(torch.float64)


class Env:
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))

    @classmethod
    def collect(cls, obj):
        if cls.world == 1:
            return [obj]
        out = [None] * cls.world
        dist.all_gather_object(out, obj)
        return out


class ShardedAdam:
    """Each process keeps the moments of one slice of the flattened parameters."""

    def __init__(self, params, lr, betas=(0.9, 0.98), eps=1e-8):
        self.params = list(params)
        self.lr, self.betas, self.eps = lr, betas, eps
        self.size = sum(p.numel() for p in self.params)
        self.slice = -(-self.size // Env.world)
        self.exp_avg = torch.zeros(self.slice)
        self.exp_avg_sq = torch.zeros(self.slice)
        self.steps = 0

    def flatten(self, tensors):
        flat = torch.cat([t.flatten() for t in tensors])
        return F.pad(flat, (0, self.slice * Env.world - self.size))

    @torch.no_grad()
    def step(self):
        grad = self.flatten([p.grad for p in self.params])
        if Env.world > 1:
            dist.all_reduce(grad)
            grad /= Env.world
        own = slice(Env.rank * self.slice, (Env.rank + 1) * self.slice)
        grad, weight = grad[own], self.flatten(self.params)[own].clone()
        self.steps += 1
        b1, b2 = self.betas
        self.exp_avg.lerp_(grad, 1 - b1)
        self.exp_avg_sq.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        m = self.exp_avg / (1 - b1 ** self.steps)
        v = self.exp_avg_sq / (1 - b2 ** self.steps)
        weight -= self.lr * m / (v.sqrt() + self.eps)
        parts = [weight]
        if Env.world > 1:
            parts = [torch.empty_like(weight) for _ in range(Env.world)]
            dist.all_gather(parts, weight)
        flat = torch.cat(parts)[: self.size]
        for p, new in zip(self.params, flat.split([p.numel() for p in self.params])):
            p.copy_(new.view_as(p))

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def state_dict(self):
        return {"exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq, "steps": self.steps}

    def load_state_dict(self, state):
        self.exp_avg.copy_(state["exp_avg"])
        self.exp_avg_sq.copy_(state["exp_avg_sq"])
        self.steps = state["steps"]


def build():
    torch.manual_seed(8)
    net = nn.Sequential(nn.Linear(13, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 3))
    return net, ShardedAdam(net.parameters(), lr=5e-3)


def run(x, y, epochs, path):
    net, optimizer = build()
    first = epochs.start
    if os.path.exists(path):
        saved = torch.load(path, weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
    for epoch in epochs:
        order = torch.randperm(160, generator=torch.Generator().manual_seed(epoch))
        for chunk in order.split(32):
            mine = chunk[Env.rank::Env.world]
            loss = F.cross_entropy(net(x[mine]), y[mine])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            value = F.cross_entropy(net(x[:160]), y[:160]).item()
        if Env.rank == 0:
            print(f"epoch {epoch:2d} loss {value:.10f}{' (resumed)' if first and epoch == first else ''}")
    if Env.rank == 0:
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
    if Env.world > 1:
        dist.barrier()
    return net


def main():
    if Env.world > 1:
        dist.init_process_group("gloo")
    wine = load_wine()
    x = torch.from_numpy(StandardScaler().fit_transform(wine.data))
    y = torch.from_numpy(wine.target).long()
    mix = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[mix], y[mix]
    folder = Env.collect(tempfile.mkdtemp() if Env.rank == 0 else None)[0]
    path = os.path.join(folder, "state.pt")
    run(x, y, range(0, 4), path)
    net = run(x, y, range(4, 8), path)
    with torch.no_grad():
        held_out = F.cross_entropy(net(x[160:]), y[160:]).item()
    if Env.rank == 0:
        print(f"held-out loss {held_out:.10f}")
        shutil.rmtree(folder)
    if Env.world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
