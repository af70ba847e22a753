"""Transformer language model split over workers by heads, hidden units and vocabulary."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
VOCAB, WIDTH, HEADS, LENGTH, DROP = 32, 32, 4, 12, 0.1


def summed(x, op=None):
    if WORLD == 1:
        return x
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, op=op or dist.ReduceOp.SUM)
    return x


class Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return summed(grad)


class Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return summed(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


def matrix(rows, cols, split, parts=1):
    """This worker's slice of a rows x cols matrix that is drawn whole."""
    full = torch.randn(rows, cols) / cols ** 0.5
    pieces = [p.chunk(WORLD, dim=split)[RANK] for p in full.chunk(parts, dim=0)]
    weight = nn.Parameter(torch.cat(pieces).contiguous())
    weight.split_over_workers = True
    return weight


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = matrix(3 * WIDTH, WIDTH, split=0, parts=3)
        self.out = matrix(WIDTH, WIDTH, split=1)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = F.linear(Enter.apply(x), self.qkv).chunk(3, dim=-1)
        q, k, v = (m.view(b, t, HEADS // WORLD, -1).transpose(1, 2) for m in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return Leave.apply(F.linear(mixed.transpose(1, 2).reshape(b, t, -1), self.out)) + self.bias


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = matrix(4 * WIDTH, WIDTH, split=0), matrix(WIDTH, 4 * WIDTH, split=1)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return Leave.apply(F.linear(F.gelu(F.linear(Enter.apply(x), self.up)), self.down)) + self.bias


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.layers = nn.ModuleList(m for _ in range(2) for m in (Attention(), FeedForward()))
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(5))
        self.head = matrix(VOCAB, WIDTH, split=0)
        self.drop = nn.Dropout(DROP)

    def forward(self, ids):
        x = self.drop(self.tokens(ids) + self.places)
        for norm, layer in zip(self.norms, self.layers):
            x = x + self.drop(layer(norm(x)))
        return F.linear(Enter.apply(self.norms[-1](x)), self.head)


def split_cross_entropy(logits, target):
    own = VOCAB // WORLD
    top = summed(logits.detach().amax(-1), dist.ReduceOp.MAX)
    shifted = logits - top.unsqueeze(-1)
    total = Leave.apply(shifted.exp().sum(-1))
    local = target - RANK * own
    here = (local >= 0) & (local < own)
    picked = shifted.gather(-1, local.clamp(0, own - 1).unsqueeze(-1)).squeeze(-1)
    return (total.log() - Leave.apply(picked * here)).mean()


def clip(model, limit):
    shared = sum(p.grad.square().sum() for p in model.parameters() if not hasattr(p, "split_over_workers"))
    split = sum(p.grad.square().sum() for p in model.parameters() if hasattr(p, "split_over_workers"))
    norm = (shared + summed(split)).sqrt()
    for p in model.parameters():
        p.grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
    return norm


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(2)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    gen = torch.Generator().manual_seed(6)
    text = torch.randint(0, VOCAB, (160, 1), generator=gen)
    for _ in range(LENGTH):
        text = torch.cat([text, (text[:, -1:] * 5 + torch.randint(0, 2, (160, 1), generator=gen)) % VOCAB], 1)

    for step in range(25):
        rows = torch.randint(0, 128, (16,), generator=gen)
        loss = split_cross_entropy(model(text[rows, :-1]), text[rows, 1:])
        optimizer.zero_grad()
        loss.backward()
        norm = clip(model, 1.0)
        optimizer.step()

    model.eval()
    with torch.no_grad():
        loss = split_cross_entropy(model(text[128:, :-1]), text[128:, 1:])
    if RANK == 0:
        print(f"validation loss {loss.item():.10f}, last gradient norm {norm.item():.10f}")
    if WORLD > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
