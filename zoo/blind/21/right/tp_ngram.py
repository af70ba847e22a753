"""Windowed n-gram model with tensor parallelism: sharded vocabulary, sharded hidden layers, sharded loss."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel, loss_parallel,
                                               parallelize_module)

VOCAB, CONTEXT, DIM, BATCH, STEPS = 64, 5, 16, 48, 10


class Mixer(nn.Module):
    def __init__(self, width, hidden):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class NGram(nn.Module):
    def __init__(self):
        super().__init__()
        width = CONTEXT * DIM
        self.emb = nn.Embedding(VOCAB, DIM)
        self.mix1 = Mixer(width, 128)
        self.mix2 = Mixer(width, 128)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCAB, bias=False)

    def forward(self, ids):
        h = self.emb(ids).flatten(1)
        return self.head(self.norm(self.mix2(self.mix1(h))))


def text(n=3000):
    g = torch.Generator().manual_seed(12)
    out = torch.randint(0, VOCAB, (n,), generator=g)
    for i in range(2, n):
        if i % 7:
            out[i] = (3 * out[i - 1] + out[i - 2]) % VOCAB
    return out


def global_norm(params):
    total = 0.0
    for p in params:
        g = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        total = total + g.square().sum()
    return total.sqrt()


def main():
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "0")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))

    torch.manual_seed(33)
    net = NGram()
    plan = {"emb": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    for name in ("mix1", "mix2"):
        plan[f"{name}.up"] = ColwiseParallel()
        plan[f"{name}.down"] = RowwiseParallel()
    parallelize_module(net, mesh, plan)
    params = list(net.parameters())
    opt = torch.optim.Adam(params, lr=3e-3, eps=1e-6, foreach=False)

    stream = text()
    g = torch.Generator().manual_seed(2)
    for step in range(STEPS):
        at = torch.randint(0, len(stream) - CONTEXT, (BATCH,), generator=g)
        ctx = torch.stack([stream[i:i + CONTEXT] for i in at.tolist()])
        target = stream[at + CONTEXT]
        opt.zero_grad()
        with loss_parallel():
            loss = F.cross_entropy(net(ctx), target)
            loss.backward()
        norm = global_norm(params)
        scale = (1.0 / (norm + 1e-6)).clamp(max=1.0)
        with torch.no_grad():
            for p in params:
                local = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
                local.mul_(scale)
        opt.step()
        value = loss.full_tensor() if isinstance(loss, DTensor) else loss
        if rank == 0 and step % 3 == 0:
            print(f"step {step} loss {value.item():.5f} norm {norm.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
