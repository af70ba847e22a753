"""Docstrings of standard library functions as a stream; which module does a docstring come from?"""
import importlib
import inspect
import os
import random
import zlib

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

MODULES = ["os", "statistics", "random", "shutil", "pathlib", "asyncio", "decimal", "turtle", "unittest.mock", "socket"]
FEATURES = 1024


def documents():
    for label, name in enumerate(MODULES):
        try:
            mod = importlib.import_module(name)
        except ImportError:
            continue
        for key in sorted(vars(mod)):
            doc = inspect.getdoc(getattr(mod, key))
            if doc and len(doc) > 30:
                yield doc[:400], label


class Stream(IterableDataset):
    def __init__(self, rank, world, buffer=128, seed=0):
        self.rank, self.world, self.buffer, self.seed = rank, world, buffer, seed
        self.epoch = 0

    def shuffled(self):
        rng = random.Random(self.seed + 1000 * self.epoch)
        held = []
        for doc in documents():
            if len(held) < self.buffer:
                held.append(doc)
                continue
            i = rng.randrange(self.buffer)
            yield held[i]
            held[i] = doc
        rng.shuffle(held)
        yield from held

    def __iter__(self):
        for n, (text, label) in enumerate(self.shuffled()):
            if n % self.world == self.rank:
                yield text, label


def collate(items):
    ids, offsets, labels = [], [], []
    for text, label in items:
        offsets.append(len(ids))
        ids += [zlib.crc32(w.lower().encode()) % FEATURES for w in text.split()]
        labels.append(label)
    return torch.tensor(ids), torch.tensor(offsets), torch.tensor(labels)


class Bow(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(FEATURES, 32, mode="mean")
        self.out = nn.Sequential(nn.Tanh(), nn.Linear(32, len(MODULES)))

    def forward(self, ids, offsets):
        return self.out(self.bag(ids, offsets))


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29641").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    steps = len(list(documents())) // 16
    torch.manual_seed(10)
    model = DDP(Bow())
    opt = torch.optim.Adagrad(model.parameters(), lr=0.05)
    data = Stream(rank, world)
    for epoch in range(2):
        data.epoch = epoch
        total = torch.zeros(2)
        for i, (ids, offsets, labels) in enumerate(DataLoader(data, 16 // world, collate_fn=collate)):
            if i == steps:
                break
            logits = model(ids, offsets)
            loss = nn.functional.cross_entropy(logits, labels)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([(logits.argmax(1) == labels).sum().item(), len(labels)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: running accuracy {total[0] / total[1]:.5f} over {int(total[1])}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
