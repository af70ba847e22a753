"""Continuous bag of words on the source of a library module."""
import os
import re
import textwrap
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30067")

WINDOW, DIM, BATCH, STEPS = 2, 24, 128, 100


def corpus():
    words = re.findall(r"[a-z]{2,}", Path(textwrap.__file__).read_text().lower())
    index = {w: i for i, w in enumerate(set(words))}
    ids = torch.tensor([index[w] for w in words])
    span = ids.unfold(0, 2 * WINDOW + 1, 1)
    context = torch.cat([span[:, :WINDOW], span[:, WINDOW + 1:]], dim=1)
    return context, span[:, WINDOW], len(index)


class CBOW(nn.Module):
    def __init__(self, vocab):
        super().__init__()
        self.table = nn.Embedding(vocab, DIM)
        self.out = nn.Linear(DIM, vocab)

    def forward(self, context):
        return self.out(self.table(context).mean(1))


def average_gradients(module, world):
    flat = torch.cat([p.grad.flatten() for p in module.parameters()])
    dist.all_reduce(flat)
    flat /= world
    offset = 0
    for p in module.parameters():
        p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
        offset += p.numel()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    context, target, vocab = corpus()
    torch.manual_seed(6)
    model = CBOW(vocab)
    for p in model.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    gen = torch.Generator().manual_seed(9)
    for step in range(STEPS):
        rows = torch.randint(len(target), (BATCH,), generator=gen)[rank::world]
        loss = F.cross_entropy(model(context[rows]), target[rows])
        opt.zero_grad()
        loss.backward()
        average_gradients(model, world)
        opt.step()
        if step % 20 == 19:
            with torch.no_grad():
                part = F.cross_entropy(model(context[rank::world]), target[rank::world], reduction="sum")
            dist.all_reduce(part)
            if rank == 0:
                print(f"step {step + 1} loss over the corpus {part.item() / len(target):.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
