"""
A small character GPT, after the well-known single-file trainer.

$ python char_scribe.py
$ torchrun --standalone --nproc-per-node=4 char_scribe.py
"""
import math
import os
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel as DDP

block_size, n_layer, n_head, n_embd = 24, 2, 2, 32
batch_size, gradient_accumulation_steps = 4, 8
max_iters, warmup_iters, learning_rate, min_lr = 24, 4, 3e-3, 3e-4
weight_decay, grad_clip, eval_interval, eval_iters = 0.1, 1.0, 8, 6

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    init_process_group(backend="gloo")
    ddp_rank = int(os.environ["RANK"])
    ddp_world_size = int(os.environ["WORLD_SIZE"])
    master_process = ddp_rank == 0
    assert gradient_accumulation_steps % ddp_world_size == 0
    gradient_accumulation_steps //= ddp_world_size
else:
    master_process, ddp_rank, ddp_world_size = True, 0, 1
torch.manual_seed(1337)
ctx = torch.autocast(device_type="cpu", dtype=torch.bfloat16)

writer = random.Random(1337)
words = "the a old young king queen ship sea wind sings sleeps turns over under and".split()
text = " ".join(writer.choice(words) for _ in range(3000))
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])
train_data, val_data = data[:-2000], data[-2000:]


def get_batch(source, generator):
    ix = torch.randint(len(source) - block_size - 1, (batch_size,), generator=generator).tolist()
    x = torch.stack([source[i:i + block_size] for i in ix])
    y = torch.stack([source[i + 1:i + 1 + block_size] for i in ix])
    return x, y


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd, bias=False), nn.Linear(n_embd, n_embd, bias=False)
        self.fc, self.fc_proj = nn.Linear(n_embd, 4 * n_embd, bias=False), nn.Linear(4 * n_embd, n_embd, bias=False)

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (z.view(B, T, n_head, -1).transpose(1, 2) for z in self.c_attn(self.ln_1(x)).split(C, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.fc_proj(F.gelu(self.fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(len(chars), n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd)
        self.lm_head = nn.Linear(n_embd, len(chars), bias=False)
        self.wte.weight = self.lm_head.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe.weight[:idx.size(1)]
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.float().view(-1, logits.size(-1)), targets.view(-1))


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / warmup_iters
    ratio = (it - warmup_iters) / (max_iters - warmup_iters)
    return min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss(model):
    model.eval()
    out = {}
    for split, source in (("train", train_data), ("val", val_data)):
        generator = torch.Generator().manual_seed(99)
        with ctx:
            losses = torch.stack([model(*get_batch(source, generator)) for _ in range(eval_iters)])
        out[split] = losses.mean().item()
    model.train()
    return out


raw_model = GPT()
model = DDP(raw_model) if ddp else raw_model
decay = [p for p in raw_model.parameters() if p.dim() >= 2]
nodecay = [p for p in raw_model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": weight_decay},
                               {"params": nodecay, "weight_decay": 0.0}], lr=learning_rate, betas=(0.9, 0.99))
draw = torch.Generator().manual_seed(4242)

for iter_num in range(max_iters + 1):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss(raw_model)
        print(f"step {iter_num}: train loss {losses['train']:.5f}, val loss {losses['val']:.5f}")
    if iter_num == max_iters:
        break
    micro_batches = [get_batch(train_data, draw) for _ in range(gradient_accumulation_steps * ddp_world_size)]
    for micro_step, (X, Y) in enumerate(micro_batches[ddp_rank::ddp_world_size]):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            loss = model(X, Y) / gradient_accumulation_steps
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)

if ddp:
    destroy_process_group()
