"""Context parallelism: every rank has the same sequences but keeps only some of their positions.

Positions are dealt in a zigzag, so that causal attention costs each rank the same.
"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

SEQ, BATCH, VOCAB, WIDTH, HEADS, STEPS = 48, 6, 17, 32, 4, 16


class GatherPositions(torch.autograd.Function):
    """Concatenate along the sequence; the gradient of a position is the sum over all its readers."""

    @staticmethod
    def forward(ctx, x):
        ctx.length = x.shape[2]
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        start = dist.get_rank() * ctx.length
        return grad[:, :, start:start + ctx.length]


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, HEADS, -1).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        k, v = GatherPositions.apply(torch.stack([k, v]).flatten(0, 1)).chunk(2)
        scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(~mask, float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, t, WIDTH))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))

    def forward(self, x, mask):
        x = x + self.attention(self.n1(x), mask)
        return x + self.mlp(self.n2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(VOCAB, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids, positions, mask):
        x = self.token(ids) + self.place(positions)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


def zigzag(rank, world):
    chunks = torch.arange(SEQ).chunk(2 * world)
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]])


def sequences(g):
    """A short motif that comes back shifted by one: next token = token eight places ago + 1."""
    ids = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=g)
    for t in range(8, SEQ + 1):
        ids[:, t] = (ids[:, t - 8] + 1) % VOCAB
    return ids[:, :-1], ids[:, 1:]


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(6)
    model = Model().double()
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    positions = zigzag(rank, world)
    everywhere = torch.cat([zigzag(r, world) for r in range(world)])
    mask = positions[:, None] >= everywhere[None, :]
    g = torch.Generator().manual_seed(99)

    for step in range(STEPS):
        ids, targets = sequences(g)
        logits = model(ids[:, positions], positions, mask)
        scored = (positions >= 8).expand(BATCH, -1)
        losses = F.cross_entropy(logits.flatten(0, 1), targets[:, positions].flatten(), reduction="none")
        loss = (losses * scored.flatten()).sum() / (BATCH * (SEQ - 8))
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 4 == 3:
            print(f"step {step + 1}: loss {shown:.10f}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
