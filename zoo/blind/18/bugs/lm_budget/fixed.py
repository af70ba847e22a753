"""Causal model on nested brackets; the learning rate is planned over tokens instead of steps."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

VOCAB, LENGTH, WIDTH, BATCH, PAD = 8, 20, 24, 32, -100
WARM_TOKENS, ALL_TOKENS, PEAK = 3000, 15000, 6e-3


def brackets(gen):
    """one line: opening symbols 1..3, closing symbols 4..6, 7 ends the line"""
    size = int(torch.randint(3, LENGTH - 2, (), generator=gen))
    line, stack = [0], []
    while len(line) < size:
        if stack and torch.rand((), generator=gen) < 0.45:
            line.append(stack.pop() + 3)
        else:
            stack.append(int(torch.randint(1, 4, (), generator=gen)))
            line.append(stack[-1])
    return torch.tensor(line + [7])


class Lines:
    def __init__(self, count, seed):
        gen = torch.Generator().manual_seed(seed)
        self.lines = [brackets(gen) for _ in range(count)]

    def batch(self, numbers):
        ids = torch.zeros(len(numbers), LENGTH, dtype=torch.long)
        goal = torch.full((len(numbers), LENGTH), PAD)
        for row, n in enumerate(numbers):
            line = self.lines[n]
            ids[row, :len(line) - 1] = line[:-1]
            goal[row, :len(line) - 1] = line[1:]
        return ids, goal


class CausalNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.convs = nn.ModuleList([nn.Conv1d(WIDTH, 2 * WIDTH, 3, dilation=2 ** i) for i in range(3)])
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, ids):
        x = self.embed(ids).transpose(1, 2)
        for i, conv in enumerate(self.convs):
            a, b = conv(F.pad(x, (2 ** (i + 1), 0))).chunk(2, 1)
            x = x + torch.tanh(a) * torch.sigmoid(b)
        return self.head(x.transpose(1, 2))


def rate(tokens):
    if tokens < WARM_TOKENS:
        return PEAK * (tokens + 300) / (WARM_TOKENS + 300)
    done = min(1.0, (tokens - WARM_TOKENS) / (ALL_TOKENS - WARM_TOKENS))
    return PEAK * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    lines, held = Lines(640, seed=30), Lines(64, seed=31)
    torch.manual_seed(32)
    net = CausalNet()
    model = DistributedDataParallel(net) if world > 1 else net
    opt = torch.optim.AdamW(net.parameters(), lr=PEAK, betas=(0.9, 0.98), weight_decay=0.05)
    tokens = 0
    for step in range(40):
        at = step * BATCH % 640 + rank * BATCH // world
        ids, goal = lines.batch(range(at, at + BATCH // world))
        count = (goal != PAD).sum()
        if world > 1:
            dist.all_reduce(count)
        for group in opt.param_groups:
            group["lr"] = rate(tokens)
        loss = F.cross_entropy(model(ids).flatten(0, 1), goal.flatten(), ignore_index=PAD, reduction="sum")
        loss = loss * world / count
        opt.zero_grad()
        loss.backward()
        opt.step()
        tokens += int(count)
        if step % 10 == 9:
            with torch.no_grad():
                ids, goal = held.batch(range(64))
                value = F.cross_entropy(net(ids).flatten(0, 1), goal.flatten(), ignore_index=PAD).item()
            if rank == 0:
                print(f"step {step + 1} held-out loss {value:.8f} perplexity {math.exp(value):.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
