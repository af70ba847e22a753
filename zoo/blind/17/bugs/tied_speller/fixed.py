"""Character model of invented place names; input and output embeddings are shared."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAD, START, END = 26, 27, 28
GLOBAL_BATCH = 24
STEPS = 40


def make_names(n):
    g = torch.Generator().manual_seed(5)
    heads = ["ax", "wells", "stow", "kirk", "pen", "ash", "north", "glen", "dun"]
    middles = ["a", "ing", "er", "o", "by"]
    tails = ["ton", "ham", "ford", "wick", "mouth", "ley", "bury"]
    names = []
    for _ in range(n):
        a, b, c = (int(torch.randint(0, len(x), (1,), generator=g)) for x in (heads, middles, tails))
        names.append(heads[a] + middles[b] + tails[c])
    longest = max(map(len, names))
    table = torch.full((n, longest + 2), PAD)
    for i, name in enumerate(names):
        codes = [START] + [LETTERS.index(ch) for ch in name] + [END]
        table[i, :len(codes)] = torch.tensor(codes)
    return table


class Speller(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Embedding(29, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.mix = nn.Linear(width, width)
        self.decode = nn.Linear(width, 29)
        nn.init.normal_(self.embed.weight, std=0.2)
        self.decode.weight = self.embed.weight

    def forward(self, chars):
        hidden, _ = self.rnn(self.embed(chars))
        return self.decode(torch.tanh(self.mix(hidden)))


def reduce_gradients(model):
    for p in model.parameters():
        dist.all_reduce(p.grad)


def step_rows(table, step):
    first = (step * GLOBAL_BATCH) % len(table)
    return table[first:first + GLOBAL_BATCH]


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    table = make_names(240)
    model = Speller()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.8)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

    for step in range(STEPS):
        rows = step_rows(table, step)[RANK::WORLD]
        inputs, targets = rows[:, :-1], rows[:, 1:]
        count = (targets != PAD).sum()
        if WORLD > 1:
            dist.all_reduce(count)
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum") / count
        optimizer.zero_grad()
        loss.backward()
        if WORLD > 1:
            reduce_gradients(model)
        optimizer.step()
        schedule.step()
        if step % 10 == 9:
            shown = loss.detach().clone()
            if WORLD > 1:
                dist.all_reduce(shown)
            if RANK == 0:
                print(f"step {step + 1:3d}  nats per character {shown:.8f}")

    if RANK == 0:
        print("embedding norm", f"{model.embed.weight.norm().item():.10f}")
    if WORLD > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
