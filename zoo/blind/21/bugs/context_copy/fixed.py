"""Long-sequence training with context parallelism: every process holds a slice of
each sequence, keys and values are gathered for the attention."""
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

torch.set_default_dtype(torch.float64)


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rank, size):
        ctx.rank, ctx.size = rank, size
        parts = [torch.empty_like(x) for _ in range(size)]
        dist.all_gather(parts, x)
        return torch.cat(parts, 1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad.chunk(ctx.size, 1)[ctx.rank], None, None


class Context:
    def __init__(self):
        self.rank = int(os.environ.get("RANK", 0))
        self.size = int(os.environ.get("WORLD_SIZE", 1))
        if self.size > 1:
            dist.init_process_group("gloo")

    def split(self, x):
        return x.chunk(self.size, 1)[self.rank].contiguous()

    def gather(self, x):
        return GatherSequence.apply(x.contiguous(), self.rank, self.size) if self.size > 1 else x

    def total(self, x):
        x = x.detach().clone()
        if self.size > 1:
            dist.all_reduce(x)
        return x


class Attention(nn.Module):
    def __init__(self, dim, heads, cp):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.heads, self.cp = heads, cp

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        k, v = self.cp.gather(k), self.cp.gather(v)
        shape = lambda t: t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q, k, v = shape(q), shape(k), shape(v)
        first = self.cp.rank * q.shape[2]
        rows = torch.arange(q.shape[2])[:, None] + first
        mask = torch.arange(k.shape[2])[None] <= rows
        scores = (q @ k.mT) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, vocab, length, cp, dim=32):
        super().__init__()
        self.token = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(length, dim)
        self.layers = nn.ModuleList()
        for _ in range(2):
            self.layers.append(nn.ModuleList([
                nn.LayerNorm(dim), Attention(dim, 4, cp), nn.LayerNorm(dim),
                nn.Sequential(nn.Linear(dim, 64), nn.GELU(), nn.Linear(64, dim))]))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens, positions):
        x = self.token(tokens) + self.position(positions)
        for n1, attention, n2, mlp in self.layers:
            x = x + attention(n1(x))
            x = x + mlp(n2(x))
        return self.head(x)


def shift_left(tokens):
    """Target of each position is its successor; the last one has none."""
    return F.pad(tokens[:, 1:], (0, 1), value=-100)


def sequences(step, batch=6, half=12, vocab=12):
    gen = torch.Generator().manual_seed(500 + step)
    first = torch.randint(0, vocab, (batch, half), generator=gen)
    return torch.cat([first, (first + 1) % vocab], 1)


def main():
    cp = Context()
    torch.manual_seed(3)
    model = Decoder(vocab=12, length=24, cp=cp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    for step in range(24):
        tokens = sequences(step)
        positions = torch.arange(tokens.shape[1])[None]
        inputs, places = cp.split(tokens), cp.split(positions)
        labels = cp.split(shift_left(tokens))
        count = cp.total((labels != -100).sum())
        logits = model(inputs, places)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(),
                               ignore_index=-100, reduction="sum") / count
        optimizer.zero_grad()
        loss.backward()
        if cp.size > 1:
            for p in model.parameters():
                dist.all_reduce(p.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        mean = cp.total(loss)
        if cp.rank == 0 and step % 6 == 5:
            print(f"step {step + 1}: loss {mean.item():.10f}")
    if cp.rank == 0:
        print(f"head {model.head.weight.abs().sum().item():.10f}")
    if cp.size > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
