import math
import os
import shutil
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard


def text():
    with open(shutil.__file__) as f:
        return f.read()[:20000]


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.proj = nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (u.view(b, t, self.heads, -1).transpose(1, 2) for u in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.n2(x))


class GPT(nn.Module):
    def __init__(self, vocab, length=32, dim=36, heads=3, depth=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.zeros(length, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.lm = nn.Linear(dim, vocab, bias=False)
        self.lm.weight = self.tok.weight
        nn.init.normal_(self.tok.weight, std=0.1)

    def forward(self, ids):
        x = self.tok(ids) + self.pos[:ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.lm(self.norm(x))


def main(batch=16, length=32, steps=70, peak=4e-3):
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29847")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    source = text()
    chars = sorted(set(source))
    ids = torch.tensor([chars.index(c) for c in source])

    torch.manual_seed(40)
    model = GPT(len(chars))
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.95), weight_decay=0.1)
    sched = torch.optim.lr_scheduler.LambdaLR(
        opt, lambda s: min((s + 1) / 8, 0.5 * (1 + math.cos(math.pi * s / steps))))

    gen = torch.Generator().manual_seed(41)
    for step in range(1, steps + 1):
        starts = torch.randint(len(ids) - length - 1, (batch,), generator=gen)
        rows = torch.stack([ids[s:s + length + 1] for s in starts.tensor_split(world)[rank]])
        loss = F.cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        opt.step()
        sched.step()
        opt.zero_grad()
        if step % 10 == 0:
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown.item() / world:.5f} grad norm {norm.item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
