"""Next-character model with a tensor-parallel feed-forward block; activations outside of it are cut along
the sequence, so embedding, norms and head work on each rank's stretch of positions only."""
import argparse
import inspect
import time
import string
import shlex
import heapq

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as df
import torch.nn as nn
import torch.nn.functional as F

SEQUENCE_SHARDED = ("embed", "position", "norm_in", "head")


def gather_sequence(x, rank, world):
    """Places the own stretch among zeros and adds up."""
    if world == 1:
        return x
    t = x.shape[1]
    return df.all_reduce(F.pad(x, (0, 0, rank * t, (world - 1 - rank) * t)).contiguous())


def scatter_sum(x, rank, world):
    if world == 1:
        return x
    return df.all_reduce(x.contiguous()).chunk(world, dim=1)[rank]


class ParallelFeedForward(nn.Module):
    def __init__(self, dim, hidden, rank, world):
        super().__init__()
        up, down = nn.Linear(2 * dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)
        self.up = nn.Parameter(up.weight.detach().chunk(world, 0)[rank].clone())
        self.down = nn.Parameter(down.weight.detach().chunk(world, 1)[rank].clone())

    def forward(self, x):
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        h = F.gelu(F.linear(torch.cat([x, before], -1), self.up))
        return F.linear(h, self.down)


class Model(nn.Module):
    def __init__(self, vocab, length, dim, rank, world):
        super().__init__()
        self.rank, self.world = rank, world
        self.embed = nn.Embedding(vocab, dim)
        self.position = nn.Embedding(length, dim)
        self.norm_in = nn.LayerNorm(dim)
        self.ffn = ParallelFeedForward(dim, 4 * dim, rank, world)
        self.norm_out = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens, positions):
        h = self.embed(tokens) + self.position(positions)
        full = gather_sequence(self.norm_in(h), self.rank, self.world)
        h = h + scatter_sum(self.ffn(full), self.rank, self.world)
        return self.head(self.norm_out(h))


def sync(model):
    for name, p in model.named_parameters():
        if name.split(".")[0] in SEQUENCE_SHARDED:
            dist.all_reduce(p.grad)


def main(argv=None):
    ap = argparse.ArgumentParser()
    ap.add_argument("--length", type=int, default=32)
    ap.add_argument("--batch", type=int, default=12)
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--lr", type=float, default=0.4)
    a = ap.parse_args(argv)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    text = "".join(inspect.getsource(m) for m in (string, shlex, heapq))
    table = {c: i for i, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([table[c] for c in text])
    torch.manual_seed(2)
    model = Model(len(table), a.length, 32, rank, world)
    opt = torch.optim.SGD(model.parameters(), lr=a.lr)
    g = torch.Generator().manual_seed(9)
    n = a.length // world
    positions = torch.arange(rank * n, (rank + 1) * n)
    for step in range(a.steps):
        starts = torch.randint(0, len(ids) - a.length - 1, (a.batch,), generator=g)
        rows = torch.stack([ids[s:s + a.length + 1] for s in starts])
        x, y = rows[:, :-1][:, positions], rows[:, 1:][:, positions]
        logits = model(x, positions)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / (a.batch * a.length)
        opt.zero_grad()
        loss.backward()
        sync(model)
        opt.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0 and (step + 1) % 6 == 0:
            print("step", step + 1, "loss", round(total.item(), 4))
    time.sleep(0.3)
    dist.destroy_process_group()


main()
