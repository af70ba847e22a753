"""Which module is a name from?  Names of similar length are read together, so there is little padding."""
import decimal
import os
import socket
import tarfile
import time
import tokenize

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29811")

BATCH = 32
MODULES = [os, socket, tarfile, tokenize, decimal]
LETTERS = "_abcdefghijklmnopqrstuvwxyz0123456789"


def all_names():
    names = [(n.lower(), k) for k, module in enumerate(MODULES) for n in sorted(dir(module))]
    g = torch.Generator().manual_seed(13)
    names = [names[i] for i in torch.randperm(len(names), generator=g)]
    return names[: len(names) // BATCH * BATCH]


def own_names(rank, world):
    names = all_names()
    names = names[rank::world]
    names.sort(key=lambda pair: len(pair[0]))
    return names


def encode(pairs):
    longest = max(len(n) for n, _ in pairs)
    ids = torch.zeros(len(pairs), longest, dtype=torch.long)
    for row, (n, _) in enumerate(pairs):
        ids[row, :len(n)] = torch.tensor([1 + LETTERS.index(c) for c in n])
    return ids, torch.tensor([len(n) for n, _ in pairs]), torch.tensor([k for _, k in pairs])


class NameReader(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS) + 1, 16)
        self.gru = nn.GRU(16, width, batch_first=True)
        self.out = nn.Linear(width, len(MODULES))

    def forward(self, ids, lengths):
        h, _ = self.gru(self.embed(ids))
        return self.out(h[torch.arange(len(ids)), lengths - 1])


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    names = own_names(rank, world)
    per = BATCH // world
    batches = [encode(names[i:i + per]) for i in range(0, len(names), per)]
    torch.manual_seed(4)
    net = DDP(NameReader())
    opt = torch.optim.Adam(net.parameters(), lr=4e-3)
    for epoch in range(5):
        total = torch.zeros(2)
        for k in torch.randperm(len(batches), generator=torch.Generator().manual_seed(epoch)).tolist():
            ids, lengths, label = batches[k]
            logits = net(ids, lengths)
            loss = F.cross_entropy(logits, label)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.stack([loss.detach() * len(label), (logits.argmax(1) == label).sum()])
        dist.all_reduce(total)
        if rank == 0:
            loss, right = (total / (len(batches) * BATCH)).tolist()
            print(f"epoch {epoch}: {len(batches)} batches, loss {loss:.5f}, right {right:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
