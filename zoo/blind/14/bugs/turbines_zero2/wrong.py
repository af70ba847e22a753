"""Power of wind turbines from weather, with gradients and momentum kept by the owner of a parameter (ZeRO, stage 2).

Parameters are dealt out by size; gradients are reduced to the owner, who clips them, makes the step and hands the new
values out. Gusts make the targets heavy-tailed. Works with `python` and with `torchrun`.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

BATCH, STEPS = 64, 50


def turbines(count, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=g)
    speed = 8 + 3 * x[:, 0] + x[:, 1]
    power = torch.sigmoid(speed - 7) * (1 + 0.3 * x[:, 2]) - 0.4 * torch.relu(speed - 12) + 0.2 * torch.sin(2 * x[:, 3])
    gust = (torch.rand(count, generator=g) < 0.05) * torch.randn(count, generator=g) * 5
    return x, (power + gust + 0.05 * torch.randn(count, generator=g))[:, None]


class OwnedSGD:
    """Nesterov's momentum, one owner for each parameter."""

    def __init__(self, params, lr, momentum, max_norm):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.params, self.owners = list(params), []
        self.max_norm = max_norm
        held = [0] * self.world
        for p in self.params:
            owner = held.index(min(held))
            held[owner] += p.numel()
            self.owners.append(owner)
        self.own = [p for p, owner in zip(self.params, self.owners) if owner == self.rank]
        self.inner = torch.optim.SGD(self.own, lr=lr, momentum=momentum, nesterov=True)

    def reduce(self):
        """Mean gradients arrive at their owners; the others drop theirs."""
        for p, owner in zip(self.params, self.owners):
            dist.reduce(p.grad, dst=owner)
            if owner == self.rank:
                p.grad.div_(self.world)
            else:
                p.grad = None

    def clip(self):
        return nn.utils.clip_grad_norm_(self.own, self.max_norm)

    @torch.no_grad()
    def step(self):
        self.reduce()
        self.clip()
        self.inner.step()
        self.inner.zero_grad()
        for p, owner in zip(self.params, self.owners):
            dist.broadcast(p, src=owner)


class PowerCurve(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.enter = nn.Linear(6, width)
        self.middle = nn.Linear(width, width)
        self.leave = nn.Linear(width, 1)

    def forward(self, x):
        h = torch.tanh(self.enter(x))
        return self.leave(h + torch.tanh(self.middle(h)))


def main():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29620")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)

    torch.manual_seed(12)
    net = PowerCurve()
    optimizer = OwnedSGD(net.parameters(), lr=0.05, momentum=0.9, max_norm=0.5)
    x, y = turbines(800, seed=1)
    x_test, y_test = turbines(200, seed=2)

    order = torch.Generator().manual_seed(4)
    queue = torch.empty(0, dtype=torch.long)
    for step in range(1, STEPS + 1):
        if len(queue) < BATCH:
            queue = torch.cat([queue, torch.randperm(len(x), generator=order)])
        rows, queue = queue[:BATCH], queue[BATCH:]
        mine = rows[rank::world]
        loss = F.mse_loss(net(x[mine]), y[mine])
        loss.backward()
        optimizer.step()

        value = loss.detach().clone()
        dist.all_reduce(value)
        if step % 10 == 0 and rank == 0:
            with torch.no_grad():
                error = (net(x_test) - y_test).abs().median().item()
            print(f"step {step}: loss {value.item() / world:.4f}, median error {error:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
