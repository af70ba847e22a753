"""A small causal transformer over proverbs, with the sequence divided among processes.

Each process holds a stretch of every window: it embeds it, attends with its queries to
the keys and values of all stretches, and predicts the next letters of its stretch.
"""
import argparse
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

PROVERBS = """
a stitch in time saves nine. the early bird catches the worm. a rolling stone gathers no
moss. too many cooks spoil the broth. many hands make light work. still waters run deep.
the pen is mightier than the sword. when in rome do as the romans do. fortune favours the
bold. practice makes perfect. a watched pot never boils. birds of a feather flock together.
actions speak louder than words. look before you leap. he who hesitates is lost. better
late than never. every cloud has a silver lining. do not count your chickens before they
hatch. all that glitters is not gold. the grass is always greener on the other side. a
picture is worth a thousand words. where there is smoke there is fire. out of sight out of
mind. absence makes the heart grow fonder. an apple a day keeps the doctor away.
"""
NOTHING = -100


class AllStretches(torch.autograd.Function):
    """Joins the stretches of all processes along the time axis."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), dim=1)[dist.get_rank()]


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key_value = nn.Linear(width, 2 * width, bias=False)
        self.join = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(),
                                 nn.Linear(2 * width, width))

    def forward(self, x, mask):
        def split(t):
            return t.unflatten(2, (self.heads, -1)).transpose(1, 2)
        n = self.before(x)
        keys, values = AllStretches.apply(self.key_value(n)).chunk(2, dim=2)
        q, k, v = split(self.query(n)), split(keys), split(values)
        weight = (q @ k.transpose(2, 3) / math.sqrt(q.shape[-1])).masked_fill(~mask, -1e9)
        x = x + self.join((weight.softmax(3) @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class ProverbModel(nn.Module):
    def __init__(self, letters, window, width=32, heads=4, layers=2):
        super().__init__()
        self.letter = nn.Embedding(letters, width)
        self.place = nn.Embedding(window, width)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.out = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, letters))

    def forward(self, ids, places, window):
        x = self.letter(ids) + self.place(places)
        mask = torch.arange(window)[None, :] <= places[:, None]
        for layer in self.layers:
            x = layer(x, mask)
        return self.out(x)


def shift_left(ids):
    """Next letter at every place; the last place has none."""
    return torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], NOTHING)], dim=1)


def main(args):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    text = " ".join(PROVERBS.split())
    letters = sorted(set(text))
    ids = torch.tensor([letters.index(c) for c in text])
    torch.manual_seed(args.seed)
    model = ProverbModel(len(letters), args.window)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    draws = torch.Generator().manual_seed(args.seed)

    low, high = rank * args.window // world, (rank + 1) * args.window // world
    places = torch.arange(low, high)
    for step in range(args.steps):
        starts = torch.randint(len(ids) - args.window, (args.batch,), generator=draws)
        windows = torch.stack([ids[s:s + args.window] for s in starts.tolist()])
        mine = windows[:, low:high]
        target = shift_left(windows)[:, low:high]
        logits = model(mine, places, args.window)
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=NOTHING, reduction="sum")
        numbers = torch.stack([loss.detach(), (target != NOTHING).sum().float()])
        dist.all_reduce(numbers)
        optimizer.zero_grad()
        (loss / numbers[1]).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        if rank == 0 and (step % 8 == 0 or step == args.steps - 1):
            print(f"step {step:2d} loss per letter {(numbers[0] / numbers[1]).item():.5f}", flush=True)

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser()
    parser.add_argument("--window", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=15)
    main(parser.parse_args())
