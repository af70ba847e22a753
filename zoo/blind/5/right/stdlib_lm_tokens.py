"""GRU language model over docstrings of the standard library; windows of documents, token-weighted loss."""
import argparse
import ast
import contextlib
import json
import os
import pathlib
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset


@dataclass
class Config:
    window: int = 24      # documents per optimizer step, over all processes
    micro: int = 4        # documents per forward pass
    max_len: int = 96
    lr: float = 4e-3
    epochs: int = 2
    docs: int = 308


def harvest(limit, max_len):
    folder = pathlib.Path(json.__file__).parent.parent
    found = []
    for name in ("argparse.py", "shutil.py", "statistics.py", "random.py", "textwrap.py", "tarfile.py",
                 "zipfile/__init__.py", "threading.py", "subprocess.py", "inspect.py"):
        path = folder / name
        if not path.exists():
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                text = ast.get_docstring(node)
                if text and len(text) > 8:
                    found.append(text.encode("ascii", "replace")[:max_len])
    return found[:limit]


class Windows(IterableDataset):
    """Yields, per optimizer step, this process's documents of the window as a list of micro-batches."""

    def __init__(self, docs, cfg, rank, world):
        self.docs, self.cfg, self.rank, self.world, self.epoch = docs, cfg, rank, world, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(1000 + self.epoch)
        order = torch.randperm(len(self.docs), generator=g).tolist()
        for start in range(0, len(order), self.cfg.window):
            mine = order[start:start + self.cfg.window][self.rank::self.world]
            yield [self.pad([self.docs[i] for i in mine[k:k + self.cfg.micro]])
                   for k in range(0, len(mine), self.cfg.micro)]

    @staticmethod
    def pad(rows):
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        for line, row in zip(ids, rows):
            line[:len(row)] = torch.tensor(list(row))
        return ids


class Model(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.emb = nn.Embedding(128, width)
        self.rnn = nn.GRU(width, width, batch_first=True)
        self.out = nn.Linear(width, 128)

    def forward(self, ids):
        return self.out(self.rnn(self.emb(ids))[0])


def run(cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    data = Windows(harvest(cfg.docs, cfg.max_len), cfg, rank, world)
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr)
    for epoch in range(cfg.epochs):
        data.epoch = epoch
        nll = torch.zeros(2)
        for micros in DataLoader(data, batch_size=None):
            tokens = torch.tensor(float(sum((m[:, 1:] != 0).sum().item() for m in micros)))
            dist.all_reduce(tokens)
            for k, ids in enumerate(micros):
                last = k + 1 == len(micros)
                with contextlib.nullcontext() if last else model.no_sync():
                    logits = model(ids[:, :-1])
                    loss = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0, reduction="sum")
                    (loss * world / tokens).backward()
                nll[0] += loss.detach()
            nll[1] += tokens / world
            opt.step()
            opt.zero_grad(set_to_none=True)
        dist.all_reduce(nll)
        if rank == 0:
            print(f"epoch {epoch} nll/token {nll[0] / nll[1]:.4f} tokens {int(nll[1])}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    for key, value in vars(Config()).items():
        ap.add_argument("--" + key, type=type(value), default=value)
    torch.set_num_threads(1)
    for key, value in dict(MASTER_ADDR="127.0.0.1", MASTER_PORT="29531", RANK="0", WORLD_SIZE="1").items():
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")
    run(Config(**vars(ap.parse_args())))
    time.sleep(0.3)
    dist.destroy_process_group()
