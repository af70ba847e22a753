"""Guesses the missing middle letter of a window of text, with DTensor tensor parallelism and a vocabulary-parallel loss."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

VOCAB, DIM, SPAN = 64, 24, 3


def windows():
    text = " ".join(load_wine().DESCR.lower().split())
    codes = torch.tensor([min(max(ord(c) - 32, 0), VOCAB - 1) if c < "`" else ord(c) - 64 for c in text]).clamp(0, VOCAB - 1)
    rows = codes.unfold(0, 2 * SPAN + 1, 1)
    return torch.cat([rows[:, :SPAN], rows[:, SPAN + 1:]], 1), rows[:, SPAN]


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(2 * SPAN * DIM)
        self.up = nn.Linear(2 * SPAN * DIM, 96)
        self.down = nn.Linear(96, 2 * SPAN * DIM)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class Filler(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.ff = FeedForward()
        self.norm = nn.LayerNorm(2 * SPAN * DIM)
        self.head = nn.Linear(2 * SPAN * DIM, VOCAB)

    def forward(self, x):
        return self.head(self.norm(self.ff(self.emb(x).flatten(1))))


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    torch.manual_seed(19)
    net = Filler()
    parallelize_module(net, mesh, {
        "ff.up": ColwiseParallel(),
        "ff.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    })
    # whole tensors (embedding, norms) and cut ones do not mix in one fused call: an optimizer for each kind
    cut = [p for p in net.parameters() if isinstance(p, DTensor)]
    whole = [p for p in net.parameters() if not isinstance(p, DTensor)]
    opts = [torch.optim.Adam(cut, lr=3e-3, eps=1e-6), torch.optim.Adam(whole, lr=3e-3, eps=1e-6)]
    x, y = windows()
    draw = torch.Generator().manual_seed(44)  # all processes read the same rows
    for step in range(36):
        rows = torch.randint(len(x) - 400, (64,), generator=draw)
        for o in opts:
            o.zero_grad()
        with loss_parallel():
            loss = F.cross_entropy(net(x[rows]), y[rows])
            loss.backward()
        for o in opts:
            o.step()
        if step % 9 == 8:
            value = loss.full_tensor() if isinstance(loss, DTensor) else loss
            if rank == 0:
                print(f"step {step + 1} loss {value.item():.5f}", flush=True)
    with torch.no_grad():
        logits = net(x[-400:]).full_tensor()
    if rank == 0:
        print(f"held-out accuracy {(logits.argmax(1) == y[-400:]).float().mean().item():.4f} "
              f"nll {F.cross_entropy(logits, y[-400:]).item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
