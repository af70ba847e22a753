"""Character model of the docstrings in Python's standard library, fully sharded."""
import argparse
import ast
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard


@dataclass
class Config:
    width: int = 32
    heads: int = 4
    depth: int = 2
    longest: int = 96
    batch: int = 16
    steps: int = 30
    lr: float = 3e-3


def docstrings(longest):
    root = os.path.dirname(os.__file__)
    found = []
    for name in ("argparse", "textwrap", "random", "statistics", "heapq", "calendar"):
        with open(os.path.join(root, name + ".py"), encoding="utf-8") as f:
            tree = ast.parse(f.read())
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                doc = ast.get_docstring(node)
                if doc and len(doc) > 8:
                    found.append([min(ord(c), 127) for c in doc[:longest]])
    return found


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads = c.heads
        self.n1, self.n2 = nn.LayerNorm(c.width), nn.LayerNorm(c.width)
        self.qkv, self.out = nn.Linear(c.width, 3 * c.width), nn.Linear(c.width, c.width)
        self.ff = nn.Sequential(nn.Linear(c.width, 4 * c.width), nn.GELU(), nn.Linear(4 * c.width, c.width))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.ff(self.n2(x))


class Model(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.tok, self.pos = nn.Embedding(128, c.width), nn.Embedding(c.longest, c.width)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.depth))
        self.head = nn.Linear(c.width, 128)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def collate(docs):
    width = max(map(len, docs))
    ids = torch.zeros(len(docs), width, dtype=torch.long)
    for row, d in zip(ids, docs):
        row[:len(d)] = torch.tensor(d)
    return ids


def main(c):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Model(c)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for m in (*model.layers, model):
        m.set_gradient_divide_factor(1.0)
        m.set_force_sum_reduction_for_comms(True)
    opt = torch.optim.SGD(model.parameters(), lr=c.lr * 30, momentum=0.9)

    docs = docstrings(c.longest)
    gen = torch.Generator().manual_seed(1)
    for step in range(c.steps):
        pick = torch.randperm(len(docs), generator=gen)[:c.batch].tolist()
        pick.sort(key=lambda i: len(docs[i]))
        per = c.batch // world
        ids = collate([docs[i] for i in pick[rank * per:(rank + 1) * per]])
        target = ids[:, 1:]
        tokens = (target != 0).sum().float()
        dist.all_reduce(tokens)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=0, reduction="sum") / tokens
        loss.backward()
        opt.step()
        opt.zero_grad()
        if (step + 1) % 10 == 0:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step + 1}: {total:.6f} nats per character, {int(tokens)} characters", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name, value in vars(Config()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    main(Config(**vars(parser.parse_args())))
