"""Instruction-style tuning of a character model: a prompt is read, only the answer is scored."""
import argparse
import inspect
import os
import textwrap
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

IGNORE = -100


@dataclass
class Config:
    steps: int = 24
    window: int = 3          # micro-batches per optimizer step
    sequences: int = 16      # sequences per micro-batch over all processes
    max_len: int = 72
    hidden: int = 48
    lr: float = 0.4
    seed: int = 11


def build_pairs(cfg):
    """(prompt, answer) pairs: the signature of a function and its first sentence."""
    pairs = []
    for mod in (textwrap, argparse, inspect):
        for _, obj in sorted(vars(mod).items()):
            if not inspect.isfunction(obj) and not inspect.isclass(obj):
                continue
            members = [obj] if inspect.isfunction(obj) else [m for _, m in sorted(vars(obj).items()) if inspect.isfunction(m)]
            for fn in members:
                try:
                    src = textwrap.dedent(inspect.getsource(fn))
                except (OSError, TypeError):
                    continue
                head, _, body = src.partition("\n")
                body = " ".join(body.split()).split(". ")[0]
                if len(body) > 4:
                    pairs.append((head[:24], body[: cfg.max_len - 26]))
    return pairs


def encode(pair, cfg):
    prompt = [1] + [min(ord(c), 126) for c in pair[0]] + [2]
    answer = [min(ord(c), 126) for c in pair[1]] + [3]
    ids = (prompt + answer)[: cfg.max_len]
    labels = ([IGNORE] * len(prompt) + answer)[: cfg.max_len]
    pad = cfg.max_len - len(ids)
    return ids + [0] * pad, labels + [IGNORE] * pad


class CharModel(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.emb = nn.Embedding(128, hidden)
        self.rnn = nn.GRU(hidden, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 128)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def token_loss(logits, labels):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORE, reduction="sum")


def main():
    torch.set_num_threads(1)
    cfg = Config()
    ap = argparse.ArgumentParser()
    for name, value in vars(cfg).items():
        ap.add_argument("--" + name, type=type(value), default=value)
    cfg = Config(**vars(ap.parse_args()))
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(cfg.seed)
    model = DDP(CharModel(cfg.hidden))
    opt = torch.optim.SGD(model.parameters(), lr=cfg.lr, momentum=0.8)
    coded = [encode(p, cfg) for p in build_pairs(cfg)]
    ids = torch.tensor([c[0] for c in coded])
    labels = torch.tensor([c[1] for c in coded])
    length = (labels != IGNORE).sum(1)
    order = np.random.default_rng(cfg.seed)
    share = cfg.sequences // world

    for step in range(cfg.steps):
        chosen = torch.from_numpy(order.choice(len(ids), (cfg.window, cfg.sequences), replace=False))
        chosen = chosen.gather(1, length[chosen].argsort(dim=1, stable=True))  # less padding per process
        mine = chosen[:, rank * share:(rank + 1) * share]
        tokens = (labels[mine][..., 1:] != IGNORE).sum()
        dist.all_reduce(tokens)
        scale = world / tokens.item()
        total = torch.zeros(1)
        for k, rows in enumerate(mine):
            model.require_backward_grad_sync = k == cfg.window - 1
            loss = token_loss(model(ids[rows]), labels[rows]) * scale
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        opt.zero_grad()
        dist.all_reduce(total)
        if rank == 0 and step % 6 == 0:
            print(f"step {step:3d} loss {total.item() / world:.4f}")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
