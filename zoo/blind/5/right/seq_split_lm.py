"""Causal LM with the sequence cut over processes; keys and values are gathered, weights are replicated."""
import argparse
import inspect
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, part):
        out = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(out, part.contiguous())
        return torch.cat(out, dim=2)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=2)[dist.get_rank()]


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x, mask):
        b, t, d = x.shape
        h = self.n1(x)
        q = self.q(h).view(b, t, self.heads, -1).transpose(1, 2)
        kv = GatherSequence.apply(self.kv(h).view(b, t, self.heads, -1).transpose(1, 2))
        k, v = kv.chunk(2, dim=3)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class LM(nn.Module):
    def __init__(self, length, dim=32):
        super().__init__()
        self.tok, self.pos = nn.Embedding(128, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList([Block(dim, 4), Block(dim, 4)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, ids, offset, length):
        where = torch.arange(offset, offset + ids.shape[1])
        mask = where[:, None] >= torch.arange(length)[None, :]
        x = self.tok(ids) + self.pos(where)
        for block in self.blocks:
            x = block(x, mask)
        return F.linear(self.norm(x), self.tok.weight)


def pages(length):
    lines = [l.strip() for l in inspect.getsource(inspect).splitlines() if l.strip()]
    text, row = [], []
    for line in lines:
        row += [ord(c) & 127 for c in line] + [10]
        if len(row) > length:
            text.append(row[:length + 1])
            row = []
    return torch.tensor(text)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--length", type=int, default=64)
    ap.add_argument("--batch", type=int, default=10)
    ap.add_argument("--steps", type=int, default=32)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = pages(args.length)
    torch.manual_seed(15)
    model = LM(args.length)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    cut = slice(rank * args.length // world, (rank + 1) * args.length // world)
    g = torch.Generator().manual_seed(0)
    for step in range(args.steps):
        batch = data[torch.randint(0, len(data), (args.batch,), generator=g)]
        ids, target = batch[:, :-1], batch[:, 1:].clone()
        target[target == ord("#")] = -100
        count = (target != -100).sum()
        logits = model(ids[:, cut], cut.start, args.length)
        loss = F.cross_entropy(logits.flatten(0, 1), target[:, cut].flatten(), ignore_index=-100,
                               reduction="sum") / count
        opt.zero_grad()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, op=dist.ReduceOp.SUM)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 8 == 7:
            print(f"step {step + 1} loss {shown.item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
