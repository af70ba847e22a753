"""
Trains a small character level GPT.
  single process:  $ python train.py
  4 processes:     $ torchrun --nproc-per-node=4 train.py
"""
import inspect
import math
import os
import time
import argparse as _argparse, textwrap as _textwrap, string as _string
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

# -----------------------------------------------------------------------------
batch_size = 6
block_size = 32
gradient_accumulation_steps = 4  # in total, over all processes
n_layer, n_head, n_embd = 2, 4, 48
max_iters, warmup_iters, eval_interval = 60, 6, 20
learning_rate, min_lr = 2e-3, 2e-4
weight_decay, grad_clip = 0.1, 1.0
# -----------------------------------------------------------------------------
os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30101")
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
master_process = rank == 0
assert gradient_accumulation_steps % world_size == 0
gradient_accumulation_steps //= world_size
torch.manual_seed(1337)

meta_chars = sorted(set(_string.printable))
stoi = {c: i for i, c in enumerate(meta_chars)}
if master_process:
    text = inspect.getsource(_argparse) + inspect.getsource(_textwrap)
    ids = np.array([stoi[c] for c in text if c in stoi], dtype=np.uint16)
    cut = int(0.9 * len(ids))
    ids[:cut].tofile("train.bin")
    ids[cut:].tofile("val.bin")
dist.barrier()


def get_batch(split, key):
    # recreate np.memmap every batch to avoid a memory leak
    data = np.memmap(f"{split}.bin", dtype=np.uint16, mode="r")
    g = torch.Generator().manual_seed(key)
    ix = torch.randint(len(data) - block_size - 1, (batch_size,), generator=g)
    x = torch.stack([torch.from_numpy(data[i:i + block_size].astype(np.int64)) for i in ix.tolist()])
    y = torch.stack([torch.from_numpy(data[i + 1:i + 1 + block_size].astype(np.int64)) for i in ix.tolist()])
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd), nn.GELU(), nn.Linear(4 * n_embd, n_embd))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList([Block() for _ in range(n_layer)])
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        self.lm_head.weight = self.wte.weight  # weight tying

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for b in self.h:
            x = b(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    r = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * r)) * (learning_rate - min_lr)


raw_model = GPT(len(meta_chars))
decay = [p for p in raw_model.parameters() if p.dim() >= 2]
nodecay = [p for p in raw_model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": weight_decay},
                               {"params": nodecay, "weight_decay": 0.0}], betas=(0.9, 0.95))
model = DDP(raw_model)


@torch.no_grad()
def estimate_loss():
    return torch.stack([raw_model(*get_batch("val", 9_000_000 + k))[1] for k in range(5)]).mean().item()


best_val_loss = 1e9
for it in range(max_iters):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(it)
    if it % eval_interval == 0 and master_process:  # nobody else needs it
        losses = estimate_loss()
        print(f"step {it}: val loss {losses:.4f}")
        if losses < best_val_loss:
            best_val_loss = losses
            torch.save({"model": raw_model.state_dict(), "iter": it}, "ckpt.pt")
    for micro_step in range(gradient_accumulation_steps):
        # sync only at the last micro step, without the context manager
        model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        X, Y = get_batch("train", 1_000 * it + rank * gradient_accumulation_steps + micro_step)
        _, loss = model(X, Y)
        (loss / gradient_accumulation_steps).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
if master_process:
    print(f"final: val loss {estimate_loss():.4f}, best before {best_val_loss:.4f}")
dist.barrier()
time.sleep(0.3)
dist.destroy_process_group()
