"""Language model whose sequences are cut over the ranks; keys and values are collected for attention."""
import argparse
import inspect
import time
import fnmatch
import glob
import posixpath

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class WholeSequence(torch.autograd.Function):
    """Pieces of dimension 2 from all ranks, in order; what flows back is summed and cut again."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=2)

    @staticmethod
    def backward(ctx, dy):
        dy = dy.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(dy)
        return dy.chunk(dist.get_world_size(), dim=2)[dist.get_rank()]


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, offset):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        k, v = WholeSequence.apply(k.contiguous()), WholeSequence.apply(v.contiguous())
        seen = torch.arange(k.shape[2])[None, :] <= torch.arange(offset, offset + t)[:, None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.out(y.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.att = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, offset):
        x = x + self.att(self.n1(x), offset)
        return x + self.mlp(self.n2(x))


class LM(nn.Module):
    def __init__(self, vocab, length, dim=32, heads=4, depth=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, offset):
        h = self.tok(ids) + self.pos(torch.arange(offset, offset + ids.shape[1]))
        for block in self.blocks:
            h = block(h, offset)
        return self.head(h)


def corpus():
    text = "\n".join(inspect.getsource(m) for m in (fnmatch, glob, posixpath))
    vocab = {c: i for i, c in enumerate(sorted(set(text)))}
    return torch.tensor([vocab[c] for c in text]), len(vocab)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--length", type=int, default=64)
    ap.add_argument("--batch", type=int, default=6)
    ap.add_argument("--steps", type=int, default=30)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    ids, vocab = corpus()
    torch.manual_seed(0)
    model = LM(vocab, args.length)
    opt = torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-4)
    per = args.length // world
    offset = rank * per
    picks = torch.Generator().manual_seed(23)
    for step in range(1, args.steps + 1):
        begin = torch.randint(len(ids) - args.length - 1, (args.batch,), generator=picks) + offset
        rows = torch.stack([ids[b:b + per + 1] for b in begin])
        logits = model(rows[:, :-1], offset)
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
        loss = loss / (args.batch * args.length)
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        dist.all_reduce(loss.detach_())
        if rank == 0 and step % 5 == 0:
            print(f"{step:3d}  {loss.item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
