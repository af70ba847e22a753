"""Digits with a gated residual net and stochastic depth.

Gates start at zero, so a block learns nothing before its gate has opened.  Which blocks are skipped is
drawn for the step, input noise for the rows; each worker also has random numbers of its own, with which
it picks the picture that it describes in the log.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

BLOCKS, WIDTH, BATCH, STEPS, SURVIVE = 5, 32, 56, 45, 0.6


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.gate = nn.Parameter(torch.zeros(1))

    def forward(self, x):
        return x + self.gate * self.f(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(64, WIDTH)
        self.blocks = nn.ModuleList(Gated() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x, alive):
        h = self.stem(x)
        for block, keep in zip(self.blocks, alive):
            if keep:
                h = block(h)
        return self.head(F.silu(h))


def average_gradients(model, world):
    present = [p for p in model.parameters() if p.grad is not None]
    work = [dist.all_reduce(p.grad, async_op=True) for p in present]
    for w in work:
        w.wait()
    for p in present:
        p.grad.div_(world)
    return len(present)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)

    torch.manual_seed(6)
    model = Net()
    opt = torch.optim.AdamW(model.parameters(), lr=6e-3, weight_decay=0.02)
    torch.manual_seed(7000 + rank)
    depth = torch.Generator().manual_seed(1)
    rows_gen = torch.Generator().manual_seed(2)

    for step in range(STEPS):
        alive = (torch.rand(BLOCKS, generator=depth) < SURVIVE).tolist()
        ids = torch.randperm(1500, generator=rows_gen)[:BATCH]
        noise = 0.05 * torch.randn(BATCH, 64, generator=rows_gen)
        mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
        xb, yb = (x[ids] + noise)[mine], y[ids][mine]
        logits = model(xb, alive)
        loss = F.cross_entropy(logits, yb)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        used = average_gradients(model, world)
        opt.step()
        if step % 9 == 8:
            shown = loss.detach() / world
            dist.all_reduce(shown)
            one = int(torch.randint(0, len(xb), ()))
            if rank == 0:
                print(f"step {step + 1} loss {shown.item():.6f} tensors updated {used}; a {yb[one].item()} "
                      f"was read as {logits[one].argmax().item()}", flush=True)

    with torch.no_grad():
        out = model(x[1500:][rank::world], [True] * BLOCKS)
        part = torch.stack([F.cross_entropy(out, y[1500:][rank::world], reduction="sum"),
                            (out.argmax(1) == y[1500:][rank::world]).sum().float()])
    dist.all_reduce(part)
    if rank == 0:
        n = len(x) - 1500
        gates = " ".join(f"{b.gate.item():.4f}" for b in model.blocks)
        print(f"held-out loss {part[0].item() / n:.6f} accuracy {part[1].item() / n:.4f} gates {gates}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
