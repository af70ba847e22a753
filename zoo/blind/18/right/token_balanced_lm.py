"""Small recurrent language model; sequences are packed onto workers by length."""
import math
import os
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCAB, PAD = 48, 0
BATCH = 24


def corpus(n, seed):
    rng = random.Random(seed)
    docs = []
    for _ in range(n):
        length = min(40, max(4, int(rng.lognormvariate(2.5, 0.6))))
        mult = rng.choice([3, 5, 7, 11])
        seq = [rng.randrange(1, VOCAB)]
        while len(seq) < length:
            seq.append((seq[-1] * mult + rng.randrange(3)) % (VOCAB - 1) + 1)
        docs.append(seq)
    return docs


class Reader(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        nn.init.normal_(self.embed.weight, std=0.15)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.zeros(VOCAB))

    def forward(self, tokens):
        hidden, _ = self.rnn(self.embed(tokens))
        return F.linear(self.norm(hidden), self.embed.weight, self.bias)


def pack(lengths, bins):
    """Longest first, each onto the bin that holds the fewest tokens."""
    load = [0] * bins
    content = [[] for _ in range(bins)]
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        b = load.index(min(load))
        content[b].append(i)
        load[b] += lengths[i]
    return content


def collate(seqs):
    longest = max(len(s) for s in seqs)
    out = torch.full((len(seqs), longest), PAD)
    for row, s in zip(out, seqs):
        row[: len(s)] = torch.tensor(s)
    return out[:, :-1], out[:, 1:]


def token_loss(model, seqs):
    inputs, targets = collate(seqs)
    logits = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum")


def main():
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(11)
    model = Reader()
    if world > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)

    train, held_out = corpus(192, seed=1), corpus(61, seed=2)
    total_steps = 3 * (len(train) // BATCH)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=8e-3, total_steps=total_steps)

    for epoch in range(3):
        order = list(range(len(train)))
        random.Random(1000 + epoch).shuffle(order)
        for at in range(0, len(order), BATCH):
            batch = [train[i] for i in order[at:at + BATCH]]
            tokens = sum(len(s) - 1 for s in batch)
            mine = pack([len(s) for s in batch], world)[rank]
            loss = token_loss(model, [batch[i] for i in mine]) * world / tokens
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()

    net = model.module if world > 1 else model
    net.eval()
    stats = torch.zeros(2)
    with torch.no_grad():
        for at in range(rank, len(held_out), world):
            stats[0] += token_loss(net, [held_out[at]])
            stats[1] += len(held_out[at]) - 1
    if world > 1:
        dist.all_reduce(stats)
    if rank == 0:
        print(f"held-out perplexity {math.exp(stats[0] / stats[1]):.10f} over {int(stats[1])} tokens")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
