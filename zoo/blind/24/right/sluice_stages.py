"""A pipeline written by hand: four blocks over 1, 2 or 4 processes, GPipe order, bf16 autocast.

Only the first stage reads the pixels and only the last one knows the loss. The size of a
micro-batch is fixed, so every matmul has the same shape however many stages there are."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits

WIDTH, BLOCKS, MICROS, MICRO_SIZE = 32, 4, 4, 16


class Block(nn.Module):
    def __init__(self, index):
        super().__init__()
        torch.manual_seed(50 + index)
        self.index = index
        self.read = nn.Linear(64, WIDTH) if index == 0 else nn.Identity()
        self.ff = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.classify = nn.Linear(WIDTH, 10) if index == BLOCKS - 1 else nn.Identity()

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.read(x).float()
            x = x + self.ff(x).float()
            return self.classify(x).float()


rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
per = BLOCKS // world
stage = nn.Sequential(*[Block(i) for i in range(rank * per, (rank + 1) * per)])
first, last = rank == 0, rank == world - 1
opt = torch.optim.Adam(stage.parameters(), lr=3e-3)

digits = load_digits()
X = torch.tensor(digits.data, dtype=torch.float32) / 16
Y = torch.tensor(digits.target)
gen = torch.Generator().manual_seed(1)          # the same indices on every stage


def forward_micro(rows):
    if first:
        inp = X[rows]
    else:
        inp = torch.empty(len(rows), WIDTH)
        dist.recv(inp, rank - 1)
        inp.requires_grad_()
    out = stage(inp)
    if not last:
        dist.send(out.detach(), rank + 1)
    return inp, out


history = []
for step in range(30):
    rows = torch.randperm(1500, generator=gen)[:MICROS * MICRO_SIZE]
    opt.zero_grad()
    flight, step_loss = [], 0.0
    for m in rows.split(MICRO_SIZE):
        inp, out = forward_micro(m)
        if last:
            out = nn.functional.cross_entropy(out, Y[m]) / MICROS
            step_loss += out.item()
        flight.append((inp, out))
    for inp, out in flight:
        if last:
            out.backward()
        else:
            grad = torch.empty_like(out)
            dist.recv(grad, rank + 1)
            out.backward(grad)
        if not first:
            dist.send(inp.grad, rank - 1)
    opt.step()
    history.append(step_loss)

# evaluation flows down the pipe, the last stage reports
correct = 0
with torch.no_grad():
    for m in torch.arange(1500, 1797).split(99):
        _, out = forward_micro(m)
        if last:
            correct += (out.argmax(1) == Y[m]).sum().item()
if last:
    print("loss", " ".join(f"{v:.5f}" for v in history[4::5]))
    print(f"accuracy {correct / 297:.4f} (told by the last stage)", flush=True)

# rank 0 puts the blocks together for the checkpoint
mine = {f"{b.index}.{k}": v for b in stage for k, v in b.state_dict().items()}
if world > 1:
    pieces = [None] * world
    dist.all_gather_object(pieces, mine)
    full = {k: v for piece in pieces for k, v in piece.items()}
else:
    full = mine
time.sleep(0.3)
if world > 1:
    dist.destroy_process_group()
