"""Next-character model with the output layer split over the processes."""
import os
import time
import textwrap

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29812")

SYMBOLS = "abcdefghijklmnopqrstuvwxyz .,()\n"   # 32
CONTEXT, BATCH, STEPS = 8, 48, 120


def corpus():
    text = (textwrap.__doc__ or "") + textwrap.TextWrapper.__doc__ + "".join(
        f.__doc__ or "" for f in (textwrap.wrap, textwrap.fill, textwrap.dedent, textwrap.shorten, textwrap.indent))
    ids = [SYMBOLS.index(c) for c in text.lower() if c in SYMBOLS]
    return torch.tensor(ids)


class SplitHead(nn.Module):
    def __init__(self, linear, mesh):
        super().__init__()
        self.mesh = mesh
        self.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(0)]))
        self.bias = nn.Parameter(distribute_tensor(linear.bias.detach(), mesh, [Shard(0)]))

    def forward(self, h):
        h = DTensor.from_local(h, self.mesh, [Replicate()], run_check=False)
        h = h.to_local(grad_placements=[Replicate()])
        part = F.linear(h, self.weight.to_local(), self.bias.to_local())
        return DTensor.from_local(part, self.mesh, [Shard(-1)], run_check=False).full_tensor()


class CharModel(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.embed = nn.Embedding(len(SYMBOLS), 16)
        self.mix = nn.Linear(16 * CONTEXT, 64)
        self.norm = nn.LayerNorm(64)
        self.head = SplitHead(nn.Linear(64, len(SYMBOLS)), mesh)

    def forward(self, ids):
        h = self.embed(ids).flatten(1)
        return self.head(self.norm(torch.tanh(self.mix(h))))


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = CharModel(mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, foreach=False)

    ids = corpus()
    windows = ids.unfold(0, CONTEXT + 1, 1)
    held_out, windows = windows[-400:], windows[:-400]
    gen = torch.Generator().manual_seed(5)
    for step in range(STEPS):
        batch = windows[torch.randint(len(windows), (BATCH,), generator=gen)]
        loss = F.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if rank == 0 and (step + 1) % 30 == 0:
            print(f"{step + 1:4d} {loss.item():.5f}")

    with torch.no_grad():
        held = F.cross_entropy(model(held_out[:, :-1]), held_out[:, -1])
    if rank == 0:
        print(f"held-out loss {held.item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


main()
