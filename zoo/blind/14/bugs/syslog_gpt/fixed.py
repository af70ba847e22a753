"""A small GPT on tokenised system logs, trained in the manner of nanoGPT: four micro-batches for a step.

Every micro-batch has 16 windows over all processes. Warm-up, cosine decay, clipping, AdamW.
Usage: python FILE, or torchrun --nproc-per-node N FILE.
"""
import math
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import all_reduce, destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

vocab_size, block_size = 28, 24
n_layer, n_head, n_embd = 2, 2, 32
gradient_accumulation_steps = 4
batch_size = 16
max_iters, warmup_iters = 40, 5
learning_rate, min_lr = 4e-3, 4e-4
grad_clip = 1.0
eval_interval = 10

ddp_rank = int(os.environ.get("RANK", 0))
ddp_world_size = int(os.environ.get("WORLD_SIZE", 1))
master_process = ddp_rank == 0


def make_corpus(length, seed):
    """A chain in which each symbol has a handful of likely successors."""
    g = torch.Generator().manual_seed(seed)
    table = torch.rand(vocab_size, vocab_size, generator=g).pow(10)
    symbols = [0]
    for _ in range(length - 1):
        symbols.append(int(torch.multinomial(table[symbols[-1]], 1, generator=g)))
    return torch.tensor(symbols)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, n_head, -1).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def get_batch(data, key, first=0, stride=1):
    g = torch.Generator().manual_seed(key)
    starts = torch.randint(len(data) - block_size - 1, (batch_size,), generator=g)[first::stride]
    x = torch.stack([data[i:i + block_size] for i in starts])
    y = torch.stack([data[i + 1:i + 1 + block_size] for i in starts])
    return x, y


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29613")
init_process_group("gloo", rank=ddp_rank, world_size=ddp_world_size)
train_data, val_data = make_corpus(6000, seed=1).split([5000, 1000])
torch.manual_seed(1337)
model = DDP(GPT())
raw_model = model.module
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.1)

for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    running = torch.zeros(())
    for micro_step in range(gradient_accumulation_steps):
        X, Y = get_batch(train_data, it * gradient_accumulation_steps + micro_step, ddp_rank, ddp_world_size)
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        logits, loss = model(X, Y)
        (loss / gradient_accumulation_steps).backward()
        running += loss.detach() / gradient_accumulation_steps
    nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

    all_reduce(running)
    if master_process and (it + 1) % eval_interval == 0:
        with torch.no_grad():
            val = sum(raw_model(*get_batch(val_data, 900_000 + k))[1].item() for k in range(4)) / 4
        print(f"iter {it + 1}: loss {running.item() / ddp_world_size:.4f}, val {val:.4f}")

destroy_process_group()
