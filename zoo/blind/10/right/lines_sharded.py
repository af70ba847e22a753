"""FSDP2 language model on lines of unequal length; gradients are summed, not averaged."""
import os
import string
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

LINES, STEPS, WIDTH = 16, 50, 32


def corpus():
    with open(string.__file__, encoding="utf-8") as f:
        lines = [line.strip()[:40] for line in f if len(line.strip()) > 5]
    letters = sorted(set("".join(lines)))
    index = {c: i + 1 for i, c in enumerate(letters)}
    return [[0] + [index[c] for c in line] for line in lines], len(letters) + 1


def pad(lines):
    longest = max(map(len, lines))
    x = torch.zeros(len(lines), longest, dtype=torch.long)
    y = torch.full((len(lines), longest), -100)
    for i, line in enumerate(lines):
        x[i, : len(line)] = torch.tensor(line)
        y[i, : len(line) - 1] = torch.tensor(line[1:])
    return x, y


class Mixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 4)
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        h = F.pad(self.norm(x).transpose(1, 2), (3, 0))
        return x + self.fc(F.gelu(self.conv(h).transpose(1, 2)))


class LM(nn.Module):
    def __init__(self, letters):
        super().__init__()
        self.table = nn.Embedding(letters, WIDTH)
        self.mixers = nn.ModuleList(Mixer() for _ in range(2))
        self.out = nn.Linear(WIDTH, letters)

    def forward(self, x):
        h = self.table(x)
        for m in self.mixers:
            h = m(h)
        return self.out(h)


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29809")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    lines, letters = corpus()
    torch.manual_seed(0)
    model = LM(letters)
    for m in model.mixers:
        fully_shard(m)
    fully_shard(model)
    for m in (*model.mixers, model):
        m.set_force_sum_reduction_for_comms(True)
        m.set_gradient_divide_factor(1.0)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    g = torch.Generator().manual_seed(3)
    for step in range(1, STEPS + 1):
        picked = torch.randperm(len(lines), generator=g)[:LINES].tolist()
        letters_in_batch = sum(len(lines[i]) - 1 for i in picked)
        x, y = pad([lines[i] for i in picked[rank::world]])
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / letters_in_batch
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.8)
        opt.step()
        loss = loss.detach()
        dist.all_reduce(loss)
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {loss.item():.5f} over {letters_in_batch} letters", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
