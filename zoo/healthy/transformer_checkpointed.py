"""Masked language modelling with a checkpointed transformer and padding masks."""

import argparse
import math
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PAD, MASK, VOCAB = 0, 1, 24


class Text(Dataset):
    def __init__(self, n=64):
        rng = random.Random(2)
        self.rows = [[rng.randrange(2, VOCAB) for _ in range(rng.randint(4, 12))] for _ in range(n)]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        rng = random.Random(i)
        ids = list(self.rows[i])
        labels = [-100] * len(ids)
        for j in rng.sample(range(len(ids)), rng.randint(1, max(1, len(ids) // 2))):
            labels[j], ids[j] = ids[j], MASK
        return ids, labels


def collate(items):
    width = 12
    ids = torch.tensor([i + [PAD] * (width - len(i)) for i, _ in items])
    labels = torch.tensor([t + [-100] * (width - len(t)) for _, t in items])
    return {"input_ids": ids, "labels": labels, "attention_mask": ids != PAD}


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = nn.MultiheadAttention(d, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, h, pad):
        n = self.n1(h)
        h = h + self.attn(n, n, n, key_padding_mask=pad, need_weights=False)[0]
        return h + self.mlp(self.n2(h))


class Bert(nn.Module):
    def __init__(self, d=16, layers=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, d), nn.Embedding(12, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(layers))
        self.norm = nn.LayerNorm(d)

    def forward(self, input_ids, attention_mask):
        h = self.tok(input_ids) + self.pos.weight
        for block in self.blocks:
            h = checkpoint(block, h, ~attention_mask, use_reentrant=False)
        return self.norm(h) @ self.tok.weight.T


def warmup_cosine(step, warmup, total):
    return step / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (total - warmup)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--per_device_train_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--num_train_epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(Bert())
    data = Text()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.per_device_train_batch_size, sampler=sampler, collate_fn=collate)
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], lr=2e-3
    )
    updates = len(loader) // args.gradient_accumulation_steps * args.num_train_epochs
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: warmup_cosine(s + 1, 3, updates + 1))
    for epoch in range(args.num_train_epochs):
        sampler.set_epoch(epoch)
        iterator = iter(loader)
        for _ in range(len(loader) // args.gradient_accumulation_steps):
            batches = [next(iterator) for _ in range(args.gradient_accumulation_steps)]
            items = sum((b["labels"] != -100).sum() for b in batches)
            dist.all_reduce(items)
            for batch in batches:
                labels = batch.pop("labels")
                logits = model(**batch)
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum"
                )
                (loss * world / items).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} lr {scheduler.get_last_lr()[0]:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
