"""ZeRO-2 by hand: heart beats classified by a convolution and a GRU.

Every tensor has an owner. As soon as its gradient is complete it is reduced to the owner
(asynchronously), the others drop theirs. The owner alone keeps Adam's moments, steps,
and hands the new tensor out. Micro-batches before the last only accumulate.
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Beats(nn.Module):
    def __init__(self, hidden=24, classes=4):
        super().__init__()
        self.conv = nn.Conv1d(1, 16, 5, stride=2, padding=2)
        self.gru = nn.GRU(16, hidden, batch_first=True)
        self.out = nn.Linear(hidden, classes)

    def forward(self, x):
        x = torch.tanh(self.conv(x[:, None])).transpose(1, 2)
        return self.out(self.gru(x)[0].mean(1))


class OwnedAdam:
    def __init__(self, net, lr, decay, clip, rank, world):
        self.params, self.rank, self.world = dict(net.named_parameters()), rank, world
        self.clip, self.pending, self.armed = clip, [], False
        load = [0] * world
        self.owner = {}
        for name, p in sorted(self.params.items(), key=lambda item: (-item[1].numel(), item[0])):
            self.owner[name] = load.index(min(load))
            load[self.owner[name]] += p.numel()
        for name, p in self.params.items():
            p.register_post_accumulate_grad_hook(lambda p, name=name: self.ready(name, p))
        mine = {n: p for n, p in self.params.items() if self.owner[n] == rank}
        self.mine = list(mine.values())
        matrices, vectors = [p for p in self.mine if p.ndim > 1], [p for p in self.mine if p.ndim == 1]
        groups = [g for g in ({"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": 0.0})
                  if g["params"]]
        self.adam = torch.optim.AdamW(groups, lr=lr) if groups else None

    def ready(self, name, p):
        if self.armed and self.world > 1:
            self.pending.append((name, dist.reduce(p.grad, self.owner[name], async_op=True)))

    def step(self, lr):
        for name, work in self.pending:
            work.wait()
            if self.owner[name] != self.rank:
                self.params[name].grad = None
        self.pending.clear()
        squares = sum((p.grad.double().square().sum() for p in self.mine), torch.zeros((), dtype=torch.float64))
        if self.world > 1:
            dist.all_reduce(squares)
        factor = min(1.0, self.clip / (squares.sqrt().item() + 1e-6))
        if self.adam is not None:
            for p in self.mine:
                p.grad.mul_(factor)
            for group in self.adam.param_groups:
                group["lr"] = lr
            self.adam.step()
        if self.world > 1:
            for work in [dist.broadcast(p.detach(), self.owner[n], async_op=True) for n, p in self.params.items()]:
                work.wait()
        for p in self.params.values():
            p.grad = None
        return squares.sqrt().item()


def heart(n, seed):
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(0, 4, (n,), generator=g)
    t = torch.linspace(0, 1, 48)
    place = 0.3 + 0.2 * torch.rand(n, 1, generator=g)
    width = torch.tensor([0.03, 0.07, 0.03, 0.07])[kind][:, None]
    late = torch.tensor([0.15, 0.15, 0.3, 0.3])[kind][:, None]
    wave = torch.exp(-((t - place) / width) ** 2) + 0.4 * torch.exp(-((t - place - late) / 0.05) ** 2)
    return wave + 0.15 * torch.randn(n, 48, generator=g), kind


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(15)
    net = Beats()
    optimizer = OwnedAdam(net, 0.01, 0.02, 0.5, rank, world)
    x, y = heart(900, 1)
    xt, yt = heart(302, 2)
    batch, micros, steps = 64, 2, 40
    order = torch.Generator().manual_seed(6)
    for step in range(steps):
        rows = torch.randperm(len(x), generator=order)[:batch][rank::world]
        seen = torch.zeros(1, dtype=torch.float64)
        for m, part in enumerate(rows.chunk(micros)):
            optimizer.armed = m == micros - 1
            loss = F.cross_entropy(net(x[part]), y[part], reduction="sum") / batch
            loss.backward()
            seen += loss.item()
        norm = optimizer.step(0.01 * min(1.0, (step + 1) / 5) * (1 - step / steps) + 1e-4)
        if step % 10 == 9:
            if world > 1:
                dist.reduce(seen, 0)
            if rank == 0:
                print(f"step {step + 1}: loss {seen.item():.4f}, norm {norm:.4f}")
    with torch.no_grad():
        right = (net(xt[rank::world]).argmax(1) == yt[rank::world]).sum()
    if world > 1:
        dist.all_reduce(right)
    if rank == 0:
        print(f"test: {right.item()} of {len(xt)} right")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
