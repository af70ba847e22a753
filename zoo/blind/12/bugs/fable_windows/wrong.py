"""A small causal transformer on characters, random windows of the text."""
import os
import time
from contextlib import closing

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

FABLE = (
    "a crow, half dead with thirst, came upon a pitcher which had once been full of water; but when the crow "
    "put its beak into the mouth of the pitcher he found that only very little water was left in it, and that "
    "he could not reach far enough down to get at it. he tried, and he tried, but at last had to give up in "
    "despair. then a thought came to him, and he took a pebble and dropped it into the pitcher. "
)
BLOCK, BATCH, WIDTH, STEPS = 16, 32, 32, 40


class Session:
    def __init__(self):
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def mean(self, v):
        v = v.detach().clone()
        dist.all_reduce(v)
        return (v / self.world).item()

    def close(self):
        time.sleep(0.3)
        dist.destroy_process_group()


class TinyGPT(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.tok = nn.Embedding(vocab, WIDTH)
        self.pos = nn.Parameter(torch.randn(BLOCK, WIDTH) * 0.02)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.ff = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.head = nn.Linear(WIDTH, vocab)

    def forward(self, idx):
        h = self.tok(idx) + self.pos
        q, k, v = self.qkv(h).view(*idx.shape, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.proj(a.transpose(1, 2).flatten(2))
        return self.head(h + self.ff(h))


def get_batch(ids, g, rank, world):
    at = torch.randint(len(ids) - BLOCK - 1, (BATCH // world,), generator=g)
    x = torch.stack([ids[i:i + BLOCK] for i in at])
    y = torch.stack([ids[i + 1:i + 1 + BLOCK] for i in at])
    return x, y


with closing(Session()) as s:
    torch.set_default_dtype(torch.float64)
    chars = sorted(set(FABLE))
    ids = torch.tensor([chars.index(c) for c in FABLE])
    torch.manual_seed(1337)
    model = DDP(TinyGPT(len(chars)))
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
    g = torch.Generator().manual_seed(1337)
    for it in range(STEPS):
        x, y = get_batch(ids, g, s.rank, s.world)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        if it % 10 == 9:
            shown = s.mean(loss)
            if s.rank == 0:
                print(f"iter {it + 1}: {shown:.5f}")
