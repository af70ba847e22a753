"""Distil a GRU tagger into a smaller one. Two micro-batches per update, masked positions only, sequences of all lengths."""
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

VOCAB, TAGS, ACCUMULATE, BATCH, STEPS = 40, 7, 2, 32, 32


class Tagger(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, TAGS)

    def forward(self, ids):
        return self.out(self.rnn(self.embed(ids))[0])


def corpus(count, gen):
    length = torch.randint(4, 19, (count,), generator=gen)
    ids = torch.randint(VOCAB, (count, 18), generator=gen)
    inside = torch.arange(18) < length[:, None]
    chosen = inside & (torch.rand(count, 18, generator=gen) < 0.7)
    chosen[:, 0] = True
    return ids, chosen


def distance(student, teacher, heat=2.0):
    """KL per position"""
    p = F.log_softmax(teacher / heat, -1)
    q = F.log_softmax(student / heat, -1)
    return heat * heat * (p.exp() * (p - q)).sum(-1)


def validate(student, teacher, ids, chosen):
    with torch.no_grad():
        kl = distance(student(ids), teacher(ids))
    return (kl[chosen].sum() / chosen.sum()).item()


def main():
    torch.set_default_dtype(torch.float64)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")

    torch.manual_seed(12)
    teacher = Tagger(48).requires_grad_(False)
    teacher.out.weight.mul_(8)
    student = Tagger(16)
    model = DDP(student) if world > 1 else student
    opt = torch.optim.SGD(student.parameters(), lr=0.5, momentum=0.9)

    gen = torch.Generator().manual_seed(13)
    ids, chosen = corpus(1024, gen)
    val_ids, val_chosen = corpus(128, gen)

    for step in range(STEPS):
        at = step * BATCH % len(ids)
        rows = torch.arange(at, at + BATCH).chunk(world)[rank]
        count = chosen[rows].sum()
        if world > 1:
            dist.all_reduce(count)
        parts = rows.chunk(ACCUMULATE)
        for i, part in enumerate(parts):
            last = i == len(parts) - 1
            wait = contextlib.nullcontext() if last or world == 1 else model.no_sync()
            with wait:
                kl = distance(model(ids[part]), teacher(ids[part]))
                loss = (kl * chosen[part]).sum() / count * world
                loss.backward()
        opt.step()
        opt.zero_grad()
        if step % 8 == 7:
            value = validate(student, teacher, val_ids, val_chosen)
            if rank == 0:
                print(f"step {step + 1:2d} validation KL {value:.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
