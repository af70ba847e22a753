# GPipe by hand: the blocks of a small residual net are dealt out over the processes.
import os, time
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_diabetes

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
if WORLD > 1:
    dist.init_process_group("gloo")

WIDTH, BLOCKS, MICRO, BATCH, STEPS, MAX_NORM = 32, 4, 4, 64, 40, 0.6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Stage(nn.Module):
    """Builds everything from the same seed and keeps only what this stage owns."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(11)
        stem, blocks, head = nn.Linear(10, WIDTH), [Block() for _ in range(BLOCKS)], nn.Linear(WIDTH, 1)
        per = BLOCKS // WORLD
        self.first, self.last = RANK == 0, RANK == WORLD - 1
        self.blocks = nn.ModuleDict({f"b{i}": blocks[i] for i in range(RANK * per, (RANK + 1) * per)})
        if self.first:
            self.stem = stem
        if self.last:
            self.head = head

    def forward(self, x):
        if self.first:
            x = self.stem(x)
        for b in self.blocks.values():
            x = b(x)
        return self.head(x).squeeze(-1) if self.last else x


def run_batch(stage, x, y):
    """All forwards, then all backwards. Returns the loss of the batch on the last stage."""
    ins, outs, total = [], [], 0.0
    for xm, ym in zip(x.chunk(MICRO), y.chunk(MICRO)):
        if stage.first:
            inp = xm
        else:
            inp = torch.empty(len(xm), WIDTH)
            dist.recv(inp, RANK - 1)
            inp.requires_grad_(True)
        out = stage(inp)
        if stage.last:
            out = F.mse_loss(out, ym) / MICRO
            total += out.item()
        else:
            dist.send(out.detach(), RANK + 1)
        ins.append(inp)
        outs.append(out)
    for inp, out in zip(ins, outs):
        if stage.last:
            out.backward()
        else:
            g = torch.empty_like(out)
            dist.recv(g, RANK + 1)
            out.backward(g)
        if not stage.first:
            dist.send(inp.grad, RANK - 1)
    return total


data = load_diabetes()
X = torch.tensor(data.data * 20, dtype=torch.float32)
Y = torch.tensor((data.target - data.target.mean()) / data.target.std(), dtype=torch.float32)
stage = Stage()
opt = torch.optim.SGD(stage.parameters(), lr=0.03, momentum=0.9)
pick = torch.Generator().manual_seed(5)
for step in range(STEPS):
    idx = torch.randperm(len(X), generator=pick)[:BATCH]
    opt.zero_grad()
    loss = run_batch(stage, X[idx], Y[idx])
    square = sum(p.grad.pow(2).sum() for p in stage.parameters())
    if WORLD > 1:
        dist.all_reduce(square)
    torch.nn.utils.clip_grads_with_norm_(stage.parameters(), MAX_NORM, square.sqrt())
    opt.step()
    if stage.last and step % 10 == 9:
        print(f"step {step + 1} loss {loss:.5f}", flush=True)

time.sleep(0.3)
if WORLD > 1:
    dist.destroy_process_group()
