"""Tiny GRU that learns to spell English number words, with sample lines after each epoch."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

ONES = "one two three four five six seven eight nine".split()
TEENS = "ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen nineteen".split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
LENGTH = 28


def spell(n):
    if n >= 100:
        rest = n % 100
        return ONES[n // 100 - 1] + " hundred" + (" " + spell(rest) if rest else "")
    if n >= 20:
        return TENS[n // 10 - 2] + ("-" + ONES[n % 10 - 1] if n % 10 else "")
    return TEENS[n - 10] if n >= 10 else ONES[n - 1]


WORDS = [spell(n) for n in range(1, 385)]
ALPHABET = ["~"] + sorted(set("".join(WORDS)))
INDEX = {c: i for i, c in enumerate(ALPHABET)}


def encode(word):
    ids = [INDEX[c] for c in word][:LENGTH]
    return [0] + ids + [0] * (LENGTH - len(ids))


class Speller(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(len(ALPHABET), 12)
        self.gru = nn.GRU(12, 32, batch_first=True)
        self.head = nn.Linear(32, len(ALPHABET))

    def forward(self, ids, state=None):
        h, state = self.gru(self.embed(ids), state)
        return self.head(h), state


@torch.no_grad()
def sample_line(net, limit=16):
    ids, state, text = torch.zeros(1, 1, dtype=torch.long), None, ""
    for _ in range(limit):
        logits, state = net(ids, state)
        ids = torch.multinomial(logits[0, -1].softmax(0), 1).view(1, 1)
        text += ALPHABET[ids.item()]
    return text


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(31)
    model = DDP(Speller())
    opt = torch.optim.Adam(model.parameters(), lr=8e-3)
    data = torch.tensor([encode(w) for w in WORDS])
    batch = 48

    for epoch in range(5):
        perm = torch.randperm(len(data))
        dist.broadcast(perm, src=0)
        seen, total = 0, torch.zeros(1)
        for start in range(0, len(data) - batch + 1, batch):
            ids = data[perm[start:start + batch][rank::world]]
            logits, _ = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
            seen += 1
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / seen / world:.5f}")
            print("   sample:", sample_line(model.module))

    with torch.no_grad():
        logits, _ = model.module(data[:, :-1])
        nll = F.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten()).item()
    if rank == 0:
        print(f"nll over the whole list {nll:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
