# Character model of a module of the standard library, read in one pass after another.
import inspect
import math
import os
import textwrap
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

SEQUENCES = 16     # per step, all processes together
LENGTH = 24
STEPS = 90


class TokenReader:
    def __init__(self, tokens, sequences, length, rank, world):
        self.tokens = tokens
        self.b, self.t = sequences // world, length
        self.rank, self.world = rank, world
        self.base = 0
        self.passes = 0

    def next_batch(self):
        b, t = self.b, self.t
        start = self.base + self.rank * b * t
        piece = self.tokens[start : start + b * t + 1]
        x = piece[:-1].view(b, t)
        y = piece[1:].view(b, t)
        self.base += b * t
        if self.base + b * t * self.world + 1 > len(self.tokens):
            self.base = 0
            self.passes += 1
        return x, y


class CharModel(nn.Module):
    def __init__(self, letters, dim=24, hidden=48):
        super().__init__()
        self.table = nn.Embedding(letters, dim)
        self.rnn = nn.GRU(dim, hidden, batch_first=True)
        self.out = nn.Linear(hidden, letters)

    def forward(self, x):
        h, _ = self.rnn(self.table(x))
        return self.out(h)


def main():
    defaults = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29706"}
    for k, v in defaults.items():
        os.environ.setdefault(k, v)
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    text = inspect.getsource(textwrap)
    letters = sorted(set(text))
    index = {c: i for i, c in enumerate(letters)}
    tokens = torch.tensor([index[c] for c in text])

    torch.manual_seed(1337)
    model = DDP(CharModel(len(letters)))
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    reader = TokenReader(tokens, SEQUENCES, LENGTH, rank, world)

    def lr_at(step):
        return 4e-3 * min(1.0, (step + 1) / 10) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / STEPS)))

    for step in range(STEPS):
        x, y = reader.next_batch()
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in opt.param_groups:
            group["lr"] = lr_at(step)
        opt.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0 and step % 15 == 14:
            print(f"step {step + 1} loss {mean.item() / world:.5f} pass {reader.passes}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
