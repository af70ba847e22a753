"""Causal attention over a sequence that is cut over the processes (keys and values are gathered)."""
import os
import time
import textwrap
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
import torch.nn as nn
import torch.nn.functional as F

os.environ.setdefault("RANK", "0"); os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1"); os.environ.setdefault("MASTER_PORT", "30479")

LENGTH, WIDTH, HEADS, BATCH, STEPS = 64, 32, 4, 8, 40


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, h, mask):
        b, t, _ = h.shape
        q, k, v = self.qkv(self.n1(h)).chunk(3, -1)
        k = torch.cat(dnn.all_gather(k.contiguous()), 1)
        v = torch.cat(dnn.all_gather(v.contiguous()), 1)
        q, k, v = (z.view(b, -1, HEADS, WIDTH // HEADS).transpose(1, 2) for z in (q, k, v))
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        h = h + self.proj(a.transpose(1, 2).reshape(b, t, WIDTH))
        return h + self.mlp(self.n2(h))


class CharModel(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.token = nn.Embedding(vocab, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.out = nn.Linear(WIDTH, vocab)

    def forward(self, tokens):
        t = tokens.shape[1]
        first = dist.get_rank() * t
        mask = torch.arange(LENGTH)[None] <= torch.arange(first, first + t)[:, None]
        h = self.token(tokens) + self.place(torch.arange(first, first + t))
        for layer in self.layers:
            h = layer(h, mask)
        return self.out(h)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    text = Path(textwrap.__file__).read_text()
    table = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([table[c] for c in text])
    torch.manual_seed(3)
    model = CharModel(len(table))
    params = list(model.parameters())
    opt = torch.optim.AdamW(params, lr=3e-3)
    gen = torch.Generator().manual_seed(4)
    size = LENGTH // world
    for step in range(STEPS):
        starts = torch.randint(len(ids) - LENGTH - 1, (BATCH,), generator=gen)
        window = torch.stack([ids[s:s + LENGTH + 1] for s in starts.tolist()])
        part = slice(rank * size, (rank + 1) * size)
        logits = model(window[:, :-1][:, part])
        loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:][:, part].flatten(), reduction="sum")
        loss = loss / (BATCH * LENGTH)
        opt.zero_grad()
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in params])
        dist.all_reduce(flat)
        for p, g in zip(params, flat.split([p.numel() for p in params])):
            p.grad = g.view_as(p).clone()
        opt.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1} loss {total.item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


main()
