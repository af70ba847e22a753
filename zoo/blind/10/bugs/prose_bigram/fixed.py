"""A small language model on the source of the standard library, scored by perplexity."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

import argparse
import logging

CONTEXT, BATCH, STEPS = 6, 128, 100


def windows(text, letters):
    index = {c: i for i, c in enumerate(letters)}
    ids = torch.tensor([index[c] for c in text if c in index])
    return ids.unfold(0, CONTEXT + 1, 1)


class Model(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.table = nn.Embedding(letters, 16)
        self.body = nn.Sequential(nn.Linear(16 * CONTEXT, 64), nn.ReLU(), nn.Linear(64, letters))

    def forward(self, x):
        return self.body(self.table(x).flatten(1))


@torch.no_grad()
def perplexity(net, rows, rank, world):
    """Every process scores its own part of the held-out windows."""
    mine = rows.chunk(world)[rank]
    nll = F.cross_entropy(net(mine[:, :-1]), mine[:, -1])
    dist.all_reduce(nll)
    return (nll / world).exp().item()


def main():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29710")):
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    with open(logging.__file__, encoding="utf-8") as f:
        train_text = f.read(40_000)
    with open(argparse.__file__, encoding="utf-8") as f:
        held_text = f.read(12_000)
    letters = sorted(set(train_text))
    train = windows(train_text, letters)
    held = windows(held_text, letters)
    held = held[: len(held) // 8 * 8]

    torch.manual_seed(2)
    model = DDP(Model(len(letters)))
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-2, total_steps=STEPS)
    draw = torch.Generator().manual_seed(41)

    for step in range(1, STEPS + 1):
        rows = train[torch.randint(len(train), (BATCH,), generator=draw)][rank::world]
        loss = F.cross_entropy(model(rows[:, :-1]), rows[:, -1])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        if step % 25 == 0:
            score = perplexity(model.module, held, rank, world)
            if rank == 0:
                print(f"step {step}: perplexity {score:.4f}", flush=True)

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
