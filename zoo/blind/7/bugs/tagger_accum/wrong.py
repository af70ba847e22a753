"""Token kinds of Python source lines, bidirectional LSTM, gradients accumulated over several batches."""
import contextlib
import inspect
import io
import os
import argparse as source_module
import tokenize

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ACCUM = 4
MICRO = 16
WIDTH = 40


def load():
    text = inspect.getsource(source_module)
    lines = text.splitlines()
    kinds = [[0] * WIDTH for _ in lines]
    for t in tokenize.generate_tokens(io.StringIO(text).readline):
        label = {tokenize.NAME: 1, tokenize.OP: 2, tokenize.STRING: 3, tokenize.NUMBER: 4, tokenize.COMMENT: 5}.get(t.type, 0)
        (r0, c0), (r1, c1) = t.start, t.end
        if r0 == r1 and r0 <= len(lines):
            for c in range(c0, min(c1, WIDTH)):
                kinds[r0 - 1][c] = label
    keep = [i for i, l in enumerate(lines) if len(l.strip()) > 8][:480]
    x = torch.tensor([[min(ord(c), 127) for c in lines[i][:WIDTH].ljust(WIDTH)] for i in keep])
    return x, torch.tensor([kinds[i] for i in keep])


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(128, 24)
        self.lstm = nn.LSTM(24, 32, bidirectional=True, batch_first=True)
        self.out = nn.Linear(64, 6)

    def forward(self, x):
        return self.out(self.lstm(self.emb(x))[0])


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(17)
    x, y = load()
    net = Tagger()
    model = DDP(net) if world > 1 else net
    opt = torch.optim.NAdam(net.parameters(), lr=4e-3)
    per = MICRO // world
    batches = len(x) // MICRO
    for epoch in range(2):
        perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(100 + epoch))
        tail = batches - batches % ACCUM
        for i in range(batches):
            idx = perm[i * MICRO:(i + 1) * MICRO][rank * per:(rank + 1) * per]
            window = ACCUM if i < tail else batches % ACCUM
            full = (i + 1) % ACCUM == 0
            last = i + 1 == batches
            hold = world > 1 and not full
            with model.no_sync() if hold else contextlib.nullcontext():
                loss = nn.functional.cross_entropy(model(x[idx]).flatten(0, 1), y[idx].flatten())
                (loss / window).backward()
            if full or last:
                opt.step()
                opt.zero_grad()
        with torch.no_grad():
            acc = (net(x[:128]).argmax(-1) == y[:128]).float().mean()
        if rank == 0:
            print(f"epoch {epoch} accuracy {acc:.5f}")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
