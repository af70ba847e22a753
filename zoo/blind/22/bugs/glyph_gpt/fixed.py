"""Small GPT on a generated glyph stream, with gradient accumulation."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

vocab_size = 24
block_size = 32
micro_batch = 4
grad_accum_steps = 8
max_steps = 12
learning_rate = 3e-3


def make_stream(length=6000):
    g = torch.Generator().manual_seed(42)
    table = torch.softmax(2.5 * torch.randn(vocab_size, vocab_size, generator=g), dim=1)
    stream = [0]
    draws = torch.rand(length, generator=g)
    cumulative = table.cumsum(1)
    for u in draws.tolist():
        nxt = int((cumulative[stream[-1]] < u).sum())
        stream.append(min(nxt, vocab_size - 1))
    return torch.tensor(stream)


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, d=32, heads=4, depth=2):
        super().__init__()
        self.tok = nn.Embedding(vocab_size, d)
        self.pos = nn.Embedding(block_size, d)
        self.blocks = nn.Sequential(*[Block(d, heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.tok(idx) + self.pos(torch.arange(idx.size(1)))
        logits = self.lm_head(self.norm(self.blocks(x)))
        return F.cross_entropy(logits.view(-1, vocab_size), targets.reshape(-1))


def lr_at(step, warmup=3):
    if step < warmup:
        return learning_rate * (step + 1) / warmup
    ratio = (step - warmup) / (max_steps - warmup)
    return learning_rate * (0.1 + 0.45 * (1 + math.cos(math.pi * ratio)))


ddp = "RANK" in os.environ
if ddp:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
else:
    rank, world = 0, 1
assert grad_accum_steps % world == 0
accum = grad_accum_steps // world

torch.manual_seed(1337)
data = make_stream()
train, val = data[:5000], data[5000:]
model = GPT()
if ddp:
    model = DDP(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)
offsets_rng = torch.Generator().manual_seed(9)

for step in range(max_steps):
    for group in optimizer.param_groups:
        group["lr"] = lr_at(step)
    offsets = torch.randint(0, len(train) - block_size - 1, (grad_accum_steps, micro_batch), generator=offsets_rng)
    step_loss = torch.zeros(())
    for micro in range(accum):
        starts = offsets[micro * world + rank].tolist()
        x = torch.stack([train[i:i + block_size] for i in starts])
        y = torch.stack([train[i + 1:i + 1 + block_size] for i in starts])
        if ddp:
            model.require_backward_grad_sync = micro == accum - 1
        loss = model(x, y) / accum
        loss.backward()
        step_loss += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if ddp:
        dist.all_reduce(step_loss)
    if rank == 0 and step % 3 == 0:
        print(f"step {step:3d} loss {step_loss.item() / world:.5f}")

if rank == 0:
    core = model.module if ddp else model
    starts = range(0, len(val) - block_size - 1, block_size)
    x = torch.stack([val[i:i + block_size] for i in starts])
    y = torch.stack([val[i + 1:i + 1 + block_size] for i in starts])
    with torch.no_grad():
        print(f"val loss {core(x, y).item():.5f}")
if ddp:
    dist.destroy_process_group()
