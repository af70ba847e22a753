"""Transformer with query/key normalisation, tensor parallel over the attention heads
and the MLP (DTensor weights, local attention)."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

torch.set_default_dtype(torch.float64)
DIM, HEADS, VOCAB, SEQ, BATCH = 32, 4, 11, 12, 16
HEAD_DIM = DIM // HEADS


def weight(mesh, out, inp, dim):
    full = torch.randn(out, inp) * inp ** -0.5
    return nn.Parameter(distribute_tensor(full, mesh, [Shard(dim)]))


class HeadNorm(nn.Module):
    """RMS normalisation of each head; one gain vector for all heads."""

    def __init__(self, mesh):
        super().__init__()
        self.gain = nn.Parameter(distribute_tensor(torch.ones(HEAD_DIM), mesh, [Replicate()]))

    def forward(self, x):
        gain = self.gain.to_local(grad_placements=[Partial()])
        return x * (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt() * gain


class Block(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.mesh = mesh
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.wq, self.wk, self.wv = (weight(mesh, DIM, DIM, 0) for _ in range(3))
        self.wo = weight(mesh, DIM, DIM, 1)
        self.q_norm, self.k_norm = HeadNorm(mesh), HeadNorm(mesh)
        self.up, self.down = weight(mesh, 2 * DIM, DIM, 0), weight(mesh, DIM, 2 * DIM, 1)

    def spread(self, x):
        return DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)

    def heads(self, x, w):
        return F.linear(x, w).to_local().unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)

    def merge(self, local, w):
        local = DTensor.from_local(local, self.mesh, [Shard(2)], run_check=False)
        return F.linear(local, w).redistribute(self.mesh, [Replicate()]).to_local()

    def forward(self, x):
        h = self.spread(self.norm1(x))
        q, k, v = self.heads(h, self.wq), self.heads(h, self.wk), self.heads(h, self.wv)
        q, k = self.q_norm(q), self.k_norm(k)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.merge(a.transpose(1, 2).flatten(2), self.wo)
        h = F.linear(self.spread(self.norm2(x)), self.up).to_local()
        return x + self.merge(F.gelu(h), self.down)


class Model(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.position = nn.Parameter(0.02 * torch.randn(SEQ, DIM))
        self.blocks = nn.ModuleList(Block(mesh) for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    torch.manual_seed(27)
    model = Model(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, foreach=False)
    gen = torch.Generator().manual_seed(3)
    for step in range(24):
        tokens = torch.randint(0, VOCAB, (BATCH, SEQ), generator=gen)
        target = (tokens + tokens.roll(2, 1)) % VOCAB
        logits = model(tokens)[:, 2:]
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0 and step % 6 == 5:
            gain = model.blocks[0].q_norm.gain.to_local().detach()
            print(f"step {step + 1:2d} loss {loss.item():.10f} gain {gain.norm().item():.10f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
