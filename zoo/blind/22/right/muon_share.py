"""Handwritten digits with a residual MLP.

The weight matrices of the blocks are trained with Muon, everything else with AdamW.  The
orthogonalisation is the expensive part of Muon, so each matrix has one owner that keeps its momentum,
computes its update and sends the new weights to the other processes.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
BATCH = 128


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width=48, depth=3):
        super().__init__()
        self.inp = nn.Linear(64, width)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(depth)])
        self.out = nn.Linear(width, 10)

    def forward(self, x):
        return self.out(self.blocks(self.inp(x)))


def orthogonalise(g, steps=5):
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g / (g.norm() + 1e-7)
    flip = x.size(0) > x.size(1)
    if flip:
        x = x.T
    for _ in range(steps):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if flip else x


class SharedMuon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95, weight_decay=0.01):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            pending = []
            for i, p in enumerate(group["params"]):
                owner = i % WORLD
                if owner == RANK:
                    state = self.state[p]
                    if "momentum" not in state:
                        state["momentum"] = torch.zeros_like(p)
                    buf = state["momentum"].mul_(group["momentum"]).add_(p.grad)
                    update = orthogonalise(p.grad.add(buf, alpha=group["momentum"]))
                    scale = max(1.0, p.size(0) / p.size(1)) ** 0.5
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(update, alpha=-group["lr"] * scale)
                if WORLD > 1:
                    pending.append(dist.broadcast(p.data, src=owner, async_op=True))
            for work in pending:
                work.wait()


def reduce_gradients(model):
    if WORLD == 1:
        return
    grads = [p.grad for p in model.parameters()]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat)
    for g, new in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(new.view_as(g))


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    data = load_digits()
    x = torch.tensor(data.data / 16.0, dtype=torch.float32)
    y = torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(5))
    x, y = x[order], y[order]
    train_x, train_y, test_x, test_y = x[:1408], y[:1408], x[1408:], y[1408:]

    torch.manual_seed(11)
    net = Net()
    matrices = [p for p in net.blocks.parameters() if p.ndim == 2]
    chosen = {id(p) for p in matrices}
    rest = [p for p in net.parameters() if id(p) not in chosen]
    muon, adam = SharedMuon(matrices), torch.optim.AdamW(rest, lr=3e-3)

    shuffle = torch.Generator().manual_seed(17)
    for epoch in range(3):
        perm = torch.randperm(len(train_x), generator=shuffle)
        total = torch.zeros(())
        for rows in perm.split(BATCH):
            mine = rows[RANK::WORLD]
            loss = F.cross_entropy(net(train_x[mine]), train_y[mine], reduction="sum") / len(rows)
            net.zero_grad(set_to_none=True)
            loss.backward()
            reduce_gradients(net)
            muon.step()
            adam.step()
            total += loss.detach() * len(rows)
        hits = (net(test_x[RANK::WORLD]).argmax(-1) == test_y[RANK::WORLD]).sum().float()
        stats = torch.stack([total, hits])
        if WORLD > 1:
            dist.all_reduce(stats)
        if RANK == 0:
            print(f"epoch {epoch} loss {stats[0] / len(train_x):.4f} test accuracy {stats[1] / len(test_x):.4f}")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
