"""Character language model on the source of a standard library module, sharded with FSDP2."""
import inspect
import os
import textwrap

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CONTEXT = 32
GLOBAL_BATCH = 16
STEPS = 24
DIM, HEADS, LAYERS = 48, 4, 2


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(att.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class CharLM(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.tok = nn.Embedding(vocab, DIM)
        self.pos = nn.Parameter(0.02 * torch.randn(CONTEXT, DIM))
        self.blocks = nn.ModuleList(Block(DIM, HEADS) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def load_text():
    text = inspect.getsource(textwrap)
    chars = sorted(set(text))
    index = {c: i for i, c in enumerate(chars)}
    return torch.tensor([index[c] for c in text]), len(chars)


def make_mesh(world):
    shard = max(1, world // 2)
    return init_device_mesh("cpu", (world // shard, shard), mesh_dim_names=("replicate", "shard"))


def parallelize(model, mesh):
    dp = mesh
    for block in model.blocks:
        fully_shard(block, mesh=dp)
    fully_shard(model, mesh=dp)
    return model


def sample(data, step, rank, world):
    gen = torch.Generator().manual_seed(1000 + step)
    starts = torch.randint(len(data) - CONTEXT - 1, (GLOBAL_BATCH,), generator=gen)[rank::world]
    window = torch.stack([data[s:s + CONTEXT + 1] for s in starts.tolist()])
    return window[:, :-1], window[:, 1:]


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    data, vocab = load_text()
    torch.manual_seed(7)
    model = parallelize(CharLM(vocab), make_mesh(world))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)

    for step in range(STEPS):
        x, y = sample(data, step, rank, world)
        logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 8 == 7:
            print(f"step {step + 1} loss {shown.item() / world:.8f}")

    size = torch.stack([p.full_tensor().detach().pow(2).sum() for p in model.parameters()]).sum().sqrt()
    if rank == 0:
        print(f"weight norm {size.item():.8f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
