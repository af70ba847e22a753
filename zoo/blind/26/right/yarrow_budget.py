"""Next-letter model of made-up place names of very different length; every process packs its names into micro-batches
of at most a given number of letters, and synchronises with the last of them."""
import argparse
import contextlib
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

LETTERS = 14


def make_names(count, seed):
    g = torch.Generator().manual_seed(seed)
    move = torch.softmax(2.5 * torch.randn(LETTERS, LETTERS, generator=g), 1)
    names = []
    for _ in range(count):
        length = int(4 + 36 * torch.rand(1, generator=g).item() ** 3)
        name = [int(torch.randint(LETTERS, (1,), generator=g))]
        for _ in range(length):
            name.append(int(torch.multinomial(move[name[-1]], 1, generator=g)))
        names.append(torch.tensor(name))
    return names


class Causal(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.emb = nn.Embedding(LETTERS + 1, dim, padding_idx=LETTERS)
        self.c1 = nn.Conv1d(dim, dim, 3)
        self.c2 = nn.Conv1d(dim, dim, 3, dilation=2)
        self.out = nn.Linear(dim, LETTERS)

    def forward(self, x):
        h = self.emb(x).transpose(1, 2)
        h = h + torch.tanh(self.c1(F.pad(h, (2, 0))))
        h = h + torch.tanh(self.c2(F.pad(h, (4, 0))))
        return self.out(h.transpose(1, 2))


def deal(names, batch, world):
    """Longest first, each to the process that has the fewest letters so far."""
    hands, load = [[] for _ in range(world)], [0] * world
    for i in sorted(batch, key=lambda k: (-len(names[k]), k)):
        least = load.index(min(load))
        hands[least].append(i)
        load[least] += len(names[i]) - 1
    return hands


def pack(names, hand, budget):
    """Rectangles of padded names with at most `budget` places."""
    boxes, box = [], []
    for i in hand:
        if box and (len(box) + 1) * (len(names[box[0]]) - 1) > budget:
            boxes.append(box)
            box = []
        box.append(i)
    return boxes + [box]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--budget", type=int, default=90)
    ap.add_argument("--batch", type=int, default=32)
    a = ap.parse_args()
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    names = make_names(416, 7)
    torch.manual_seed(0)
    net = Causal()
    if world > 1:
        dist.init_process_group("gloo")
        net = DDP(net)
    opt = torch.optim.AdamW(net.parameters(), lr=6e-3, eps=1e-6, weight_decay=0.05)
    micro = step = 0
    for epoch in range(3):
        order = torch.randperm(len(names), generator=torch.Generator().manual_seed(epoch + 1)).tolist()
        for lo in range(0, len(order), a.batch):
            batch = order[lo:lo + a.batch]
            letters = sum(len(names[i]) - 1 for i in batch)  # of the whole batch: lengths are known to everybody
            boxes = pack(names, deal(names, batch, world)[rank], a.budget)
            opt.zero_grad()
            summed = torch.zeros(())
            for k, box in enumerate(boxes):
                x = nn.utils.rnn.pad_sequence([names[i][:-1] for i in box], batch_first=True, padding_value=LETTERS)
                y = nn.utils.rnn.pad_sequence([names[i][1:] for i in box], batch_first=True, padding_value=-100)
                quiet = net.no_sync() if world > 1 and k < len(boxes) - 1 else contextlib.nullcontext()
                with quiet:
                    loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten(), reduction="sum")
                    (loss * world / letters).backward()
                summed += loss.detach()
                micro += 1
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            opt.step()
            step += 1
        if world > 1:
            dist.all_reduce(summed)
        if rank == 0:
            print(f"epoch {epoch + 1} step {step} perplexity {torch.exp(summed / letters).item():.5f}", flush=True)
    print(f"process {rank} ran {micro} micro-batches", file=sys.stderr)
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
