"""Small causal language model on padded sequences, sharded when every worker has its own GPU."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, LENGTH, WIDTH = 48, 32, 64
BATCH = 24
STEPS = 40
PAD = 0


def documents(n, seed):
    g = torch.Generator().manual_seed(seed)
    start = torch.randint(1, VOCAB, (n, 1), generator=g)
    stride = torch.randint(1, 5, (n, 1), generator=g)
    tokens = 1 + (start + stride * torch.arange(LENGTH + 1)) % (VOCAB - 1)
    noise = torch.rand(tokens.shape, generator=g) < 0.05
    tokens = torch.where(noise, torch.randint(1, VOCAB, tokens.shape, generator=g), tokens)
    length = torch.randint(6, LENGTH + 2, (n, 1), generator=g)
    return torch.where(torch.arange(LENGTH + 1) < length, tokens, torch.tensor(PAD))


class Block(nn.Module):
    def __init__(self, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH, eps=1e-6), nn.RMSNorm(WIDTH, eps=1e-6)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.silu(self.up(self.norm2(x))))


class PackedLM(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.place = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids):
        h = self.embed(ids) + self.place(torch.arange(ids.size(1), device=ids.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def token_loss(logits, targets):
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    backend = "nccl" if torch.cuda.device_count() >= world else "gloo"
    if world > 1:
        dist.init_process_group(backend)

    torch.manual_seed(90)
    model = PackedLM().to(device)
    if world > 1 and backend == "nccl":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    elif world > 1:
        model = DDP(model, device_ids=[device.index])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), eps=1e-6, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))
    data = documents(960, seed=91)
    pick = torch.Generator().manual_seed(92)

    for step in range(STEPS):
        batch = data[torch.randint(0, len(data), (BATCH,), generator=pick)]
        tokens = (batch[:, 1:] != PAD).sum().item()
        mine = batch[rank::world].pin_memory().to(device, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(mine[:, :-1])
        loss_sum = token_loss(logits, mine[:, 1:])
        optimizer.zero_grad(set_to_none=True)
        (loss_sum * world / tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if (step + 1) % 10 == 0:
            shown = loss_sum.detach() / tokens
            if world > 1:
                dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} loss {shown.item():.4f}")

    model.eval()
    held_out = documents(96, seed=93)[rank::world].to(device)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(held_out[:, :-1])
    stats = torch.stack([token_loss(logits, held_out[:, 1:]).double(), (held_out[:, 1:] != PAD).sum().double()])
    if world > 1:
        dist.all_reduce(stats)
    if rank == 0:
        print(f"held-out loss {(stats[0] / stats[1]).item():.4f} over {int(stats[1])} tokens")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
