"""Tags characters of docstrings (letter / digit / space / sign of the next one); texts are dealt out by length."""
import os
import time
import json, csv, shlex, string, textwrap, difflib, fractions, heapq
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils.rnn import pad_sequence

for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29773").items():
    os.environ.setdefault(k, v)


def kind(c):
    return 0 if c.isalpha() else 1 if c.isdigit() else 2 if c.isspace() else 3


def sentences():
    out = []
    for module in (json, csv, shlex, string, textwrap, difflib, fractions, heapq):
        text = " ".join(
            (getattr(module, n).__doc__ or "") for n in sorted(dir(module)) if not n.startswith("_")
        ) + (module.__doc__ or "")
        out += [p[:70] for p in text.split(". ") if len(p) > 8]
    return out[:240]


def deal(rows, lengths, rank, world):
    """Longest first to the emptiest process: equal work, not equal counts; everyone gets at least one."""
    bins, load = [[] for _ in range(world)], [0] * world
    for r in sorted(rows, key=lambda r: (-lengths[r], r)):
        k = load.index(min(load))
        bins[k].append(r)
        load[k] += lengths[r] ** 2
    return bins[rank]


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(129, 16)
        self.rnn = nn.LSTM(16, 32, batch_first=True)
        self.out = nn.Linear(32, 4)

    def forward(self, t):
        return self.out(self.rnn(self.embed(t))[0])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    texts = sentences()
    tokens = [torch.tensor([min(ord(c), 127) + 1 for c in t]) for t in texts]
    labels = [torch.tensor([kind(c) for c in t]) for t in texts]
    lengths = [len(t) - 1 for t in texts]
    torch.manual_seed(8)
    model = DDP(Tagger())
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(3):
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(epoch)).tolist()
        logged = torch.zeros(2, dtype=torch.float64)
        for i in range(0, len(order), 16):
            batch = order[i:i + 16]
            mine = deal(batch, lengths, rank, world)
            t = pad_sequence([tokens[r][:-1] for r in mine], batch_first=True)
            y = pad_sequence([labels[r][1:] for r in mine], batch_first=True, padding_value=-100)
            loss = F.cross_entropy(model(t).flatten(0, 1), y.flatten(), reduction="sum")
            total = sum(lengths[r] for r in batch)
            opt.zero_grad()
            (loss * world / total).backward()
            opt.step()
            logged += torch.tensor([loss.item(), float((y >= 0).sum())], dtype=torch.float64)
        dist.all_reduce(logged)
        if rank == 0:
            print(f"epoch {epoch} loss per character {logged[0] / logged[1]:.5f} of {int(logged[1])}")
    time.sleep(0.3)
    dist.destroy_process_group()


main()
