import math
import os
from contextlib import nullcontext

import numpy as np
import torch
import torch.nn as nn
from torch.distributed import all_reduce, destroy_process_group, init_process_group
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

# data and model
vocab_size, block_size = 32, 24
n_layer, n_head, n_embd = 2, 4, 32
# optimisation
batch_size = 8
gradient_accumulation_steps = 4
learning_rate, min_lr, weight_decay = 3e-3, 3e-4, 0.1
max_iters, warmup_iters, lr_decay_iters = 30, 5, 30
beta1, beta2, grad_clip = 0.9, 0.95, 1.0
# evaluation
eval_interval, eval_iters, log_interval = 10, 4, 10

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
sequences_per_iter = gradient_accumulation_steps * ddp_world_size * batch_size

torch.manual_seed(1337)
ctx = nullcontext()
rs = np.random.RandomState(0)
table = rs.dirichlet(np.full(vocab_size, 0.15), size=vocab_size)
tokens = [0]
for _ in range(12000):
    tokens.append(int(rs.choice(vocab_size, p=table[tokens[-1]])))
train_data, val_data = torch.tensor(tokens[:10000]), torch.tensor(tokens[10000:])
train_rng = torch.Generator().manual_seed(1337)


def gather(data, ix):
    x = torch.stack([data[i:i + block_size] for i in ix])
    y = torch.stack([data[i + 1:i + 1 + block_size] for i in ix])
    return x, y


def next_batches():
    ix = torch.randint(len(train_data) - block_size, (sequences_per_iter,), generator=train_rng)
    for chunk in list(ix.split(batch_size))[ddp_rank::ddp_world_size]:
        yield gather(train_data, chunk.tolist())


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd, bias=False), nn.LayerNorm(n_embd, bias=False)
        self.c_attn = nn.Linear(n_embd, 3 * n_embd, bias=False)
        self.c_proj = nn.Linear(n_embd, n_embd, bias=False)
        self.mlp = nn.Sequential(nn.Linear(n_embd, 4 * n_embd, bias=False), nn.GELU(), nn.Linear(4 * n_embd, n_embd, bias=False))

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (t.view(B, T, n_head, C // n_head).transpose(1, 2) for t in self.c_attn(self.ln_1(x)).split(n_embd, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab_size, n_embd), nn.Embedding(block_size, n_embd)
        self.h = nn.ModuleList(Block() for _ in range(n_layer))
        self.ln_f = nn.LayerNorm(n_embd, bias=False)
        self.lm_head = nn.Linear(n_embd, vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, mean=0.0, std=0.02)

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1)))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, vocab_size), targets.reshape(-1))


raw_model = model = GPT()
groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": weight_decay},
          {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2))
if ddp:
    model = DDP(model)


@torch.no_grad()
def estimate_loss():
    out = {}
    rng = torch.Generator().manual_seed(7)
    raw_model.eval()
    for split, data in (("train", train_data), ("val", val_data)):
        losses = torch.zeros(eval_iters)
        for k in range(eval_iters):
            ix = torch.randint(len(data) - block_size, (batch_size,), generator=rng)
            losses[k] = raw_model(*gather(data, ix.tolist()))[1]
        out[split] = losses.mean().item()
    raw_model.train()
    return out


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    ratio = min(1.0, (it - warmup_iters) / (lr_decay_iters - warmup_iters))
    return min_lr + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)


for iter_num in range(max_iters + 1):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0 and master_process:
        losses = estimate_loss()
        print(f"step {iter_num}: train loss {losses['train']:.5f}, val loss {losses['val']:.5f}")
    running = torch.zeros(())
    for micro_step, (X, Y) in enumerate(next_batches()):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        with ctx:
            logits, loss = model(X, Y)
            loss = loss / gradient_accumulation_steps
        running += loss.detach()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if iter_num % log_interval == 0:
        if ddp:
            all_reduce(running)
        if master_process:
            print(f"iter {iter_num}: loss {running.item() / ddp_world_size:.5f}")

if ddp:
    destroy_process_group()
