"""Learn to reverse short digit strings with a transformer whose heads are split over the ranks."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
WORLD = int(os.environ.get("WORLD_SIZE", 1))
RANK = int(os.environ.get("RANK", 0))
DIM, HEADS, LAYERS, VOCAB, LENGTH = 32, 4, 2, 10, 8
HEAD = DIM // HEADS


class ToShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        if WORLD > 1:
            dist.all_reduce(grad)
        return grad


class FromShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        if WORLD > 1:
            dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, grad):
        return grad


def shard(full, dim):
    return nn.Parameter(full.chunk(WORLD, dim)[RANK].clone())


class Attention(nn.Module):
    def __init__(self, gen):
        super().__init__()
        std = 1 / math.sqrt(DIM)
        self.qkv = shard(torch.randn(3, HEADS, HEAD, DIM, generator=gen) * std, 1)
        self.out = shard(torch.randn(HEADS, HEAD, DIM, generator=gen) * std, 0)
        self.q_norm = nn.Parameter(torch.ones(HEAD))
        self.k_norm = nn.Parameter(torch.ones(HEAD))

    def forward(self, x):
        q, k, v = torch.einsum("bld,thed->tbhle", ToShards.apply(x), self.qkv)
        q = F.rms_norm(q, (HEAD,), self.q_norm, 1e-6)
        k = F.rms_norm(k, (HEAD,), self.k_norm, 1e-6)
        y = F.scaled_dot_product_attention(q, k, v)
        return FromShards.apply(torch.einsum("bhle,hed->bld", y, self.out))


class FeedForward(nn.Module):
    def __init__(self, gen):
        super().__init__()
        self.up = shard(torch.randn(4 * DIM, DIM, generator=gen) / math.sqrt(DIM), 0)
        self.down = shard(torch.randn(DIM, 4 * DIM, generator=gen) / math.sqrt(4 * DIM), 1)

    def forward(self, x):
        return FromShards.apply(F.gelu(ToShards.apply(x) @ self.up.T) @ self.down.T)


class Block(nn.Module):
    def __init__(self, gen):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn, self.mlp = Attention(gen), FeedForward(gen)

    def forward(self, x):
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))


class Reverser(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        gen = torch.Generator().manual_seed(seed)
        self.embed = nn.Parameter(torch.randn(VOCAB, DIM, generator=gen) * 0.5)
        self.place = nn.Parameter(torch.randn(LENGTH, DIM, generator=gen) * 0.5)
        self.blocks = nn.ModuleList([Block(gen) for _ in range(LAYERS)])
        self.head = nn.Parameter(torch.randn(VOCAB, DIM, generator=gen) / math.sqrt(DIM))

    def forward(self, ids):
        x = F.embedding(ids, self.embed) + self.place
        for block in self.blocks:
            x = block(x)
        return x @ self.head.T


def reduce_shared(model):
    if WORLD == 1:
        return
    shared = []
    for block in model.blocks:
        shared.append(block.attn.q_norm)
        shared.append(block.attn.k_norm)
    for p in shared:
        dist.all_reduce(p.grad)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    model = Reverser()
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    data = torch.Generator().manual_seed(7)
    for step in range(40):
        ids = torch.randint(VOCAB, (32, LENGTH), generator=data)
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flip(1).flatten())
        opt.zero_grad()
        loss.backward()
        reduce_shared(model)
        opt.step()
        if RANK == 0 and step % 10 == 9:
            print(f"step {step + 1} loss {loss.item():.8f}")
    with torch.no_grad():
        ids = torch.randint(VOCAB, (256, LENGTH), generator=data)
        logits = model(ids)
        acc = (logits.argmax(-1) == ids.flip(1)).double().mean()
        ce = F.cross_entropy(logits.flatten(0, 1), ids.flip(1).flatten())
    if RANK == 0:
        print(f"held out: accuracy {acc:.6f} loss {ce:.8f}")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
