"""Hand-written GPipe over a stack of residual blocks with layer-wise learning-rate decay.

Block k of K learns with base * decay ** (K - 1 - k), as in fine-tuning recipes.
Stages send activations forward and gradients back with plain send / recv.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer

BLOCKS, WIDTH, MICRO = 8, 24, 4


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, h):
        return h + self.fc2(torch.relu(self.fc1(self.norm(h))))


class Stage(nn.Module):
    def __init__(self, rank, world, n_in):
        super().__init__()
        torch.manual_seed(48)
        stem, blocks, head = nn.Linear(n_in, WIDTH), [Residual() for _ in range(BLOCKS)], nn.Linear(WIDTH, 2)
        per = BLOCKS // world
        self.first = rank * per
        self.stem = stem if rank == 0 else None
        self.blocks = nn.ModuleDict({str(k): blocks[k] for k in range(self.first, self.first + per)})
        self.head = head if rank == world - 1 else None

    def forward(self, h):
        if self.stem is not None:
            h = self.stem(h)
        for block in self.blocks.values():
            h = block(h)
        return h if self.head is None else self.head(h)


def layerwise_groups(stage, base, decay):
    groups = []
    if stage.stem is not None:
        groups.append({"params": stage.stem.parameters(), "lr": base * decay ** BLOCKS})
    for depth, block in enumerate(stage.blocks.values(), start=stage.first):
        groups.append({"params": block.parameters(), "lr": base * decay ** (BLOCKS - 1 - depth)})
    if stage.head is not None:
        groups.append({"params": stage.head.parameters(), "lr": base})
    return groups


class Pipeline:
    def __init__(self, rank, world, n_in):
        self.rank, self.world = rank, world
        self.stage = Stage(rank, world, n_in)
        self.opt = torch.optim.SGD(layerwise_groups(self.stage, base=0.05, decay=0.8), lr=0.05, momentum=0.9)
        self.is_first, self.is_last = rank == 0, rank == world - 1

    def receive(self, rows):
        h = torch.empty(rows, WIDTH)
        dist.recv(h, src=self.rank - 1)
        return h

    def step(self, x, y):
        xs, ys = x.chunk(MICRO), y.chunk(MICRO)
        kept, total = [], 0.0
        for xm, ym in zip(xs, ys):
            h = xm if self.is_first else self.receive(len(xm)).requires_grad_()
            out = self.stage(h)
            if self.is_last:
                out = F.cross_entropy(out, ym) / MICRO
                total += out.item()
            else:
                dist.send(out.detach(), dst=self.rank + 1)
            kept.append((h, out))
        self.opt.zero_grad()
        for h, out in kept:
            if self.is_last:
                out.backward()
            else:
                g = torch.empty_like(out)
                dist.recv(g, src=self.rank + 1)
                out.backward(g)
            if not self.is_first:
                dist.send(h.grad, dst=self.rank - 1)
        self.opt.step()
        return total

    @torch.no_grad()
    def predict(self, x):
        h = x if self.is_first else self.receive(len(x))
        out = self.stage(h)
        if not self.is_last:
            dist.send(out, dst=self.rank + 1)
            out = torch.empty(len(x), 2)
        if self.world > 1:
            dist.broadcast(out, src=self.world - 1)
        return out


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    raw = load_breast_cancer()
    x = torch.tensor(raw.data, dtype=torch.float32)
    x, y = (x - x.mean(0)) / x.std(0), torch.tensor(raw.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    train, test = order[:440], order[440:]

    pipe = Pipeline(rank, world, x.shape[1])
    g = torch.Generator().manual_seed(49)
    for step in range(30):
        rows = train[torch.randperm(len(train), generator=g)[:32]]
        loss = torch.tensor(pipe.step(x[rows], y[rows]))
        if world > 1:
            dist.broadcast(loss, src=world - 1)
        if rank == 0 and step % 6 == 5:
            print(f"step {step + 1} loss {loss.item():.5f}")
    logits = pipe.predict(x[test])
    if rank == 0:
        print(f"test nll {F.cross_entropy(logits, y[test]).item():.5f} "
              f"accuracy {(logits.argmax(1) == y[test]).float().mean().item():.4f}")
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
