"""Transformer text classifier: float16 autocast, gradient accumulation, clipping."""
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, LENGTH, WIDTH, TOPICS = 64, 32, 64, 4
MICRO_BATCH = 24
ACCUMULATE = 4
ROWS = 240
EPOCHS = 3


def topic_texts(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, TOPICS, (n,), generator=g)
    words = torch.randint(0, VOCAB, (n, LENGTH), generator=g)
    topical = torch.randint(0, VOCAB // TOPICS, (n, LENGTH), generator=g) * TOPICS + y.unsqueeze(1)
    use = torch.rand(n, LENGTH, generator=g) < 0.25
    return torch.where(use, topical, words), y


class Block(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.proj = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.positions = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.Sequential(Block(WIDTH), Block(WIDTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, TOPICS)

    def forward(self, ids):
        h = self.blocks(self.tokens(ids) + self.positions)
        return self.out(self.norm(h).mean(dim=1))


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")

    torch.manual_seed(42)
    net = Classifier().to(device)
    model = DDP(net, device_ids=[device.index], gradient_as_bucket_view=True) if world > 1 else net
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, eps=1e-6, weight_decay=0.05, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0 ** 12)
    ids, labels = (t.to(device) for t in topic_texts(ROWS, seed=6))
    micro_steps = ROWS // MICRO_BATCH

    for epoch in range(EPOCHS):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
        epoch_loss = torch.zeros((), device=device)
        optimizer.zero_grad(set_to_none=True)
        for i in range(micro_steps):
            window = min(ACCUMULATE, micro_steps - i // ACCUMULATE * ACCUMULATE)
            update = (i + 1) % ACCUMULATE == 0 or i + 1 == micro_steps
            idx = order[i * MICRO_BATCH:(i + 1) * MICRO_BATCH][rank::world].to(device)
            sync = nullcontext() if world == 1 or (i + 1) % ACCUMULATE == 0 else model.no_sync()
            with sync:
                with torch.autocast("cuda", dtype=torch.float16):
                    logits = model(ids[idx])
                loss = F.cross_entropy(logits.float(), labels[idx])
                scaler.scale(loss / window).backward()
            epoch_loss += loss.detach()
            if update:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
        if world > 1:
            dist.all_reduce(epoch_loss)
        if rank == 0:
            print(f"epoch {epoch} loss {epoch_loss.item() / micro_steps / world:.4f} scale {scaler.get_scale():.0f}")

    net.eval()
    test_ids, test_labels = (t[rank::world].to(device) for t in topic_texts(120, seed=7))
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
        correct = (net(test_ids).argmax(dim=1) == test_labels).sum()
    if world > 1:
        dist.all_reduce(correct)
    if rank == 0:
        print(f"test accuracy {correct.item() / 120:.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
