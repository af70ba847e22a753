"""Masked-feature pretraining on a streamed table, interrupted once in the middle of an epoch."""
import itertools
import os
import random
import shutil
import tempfile

import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes, load_wine
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

BATCH, EPOCHS = 24, 3


class Stream(IterableDataset):
    """Rows through a shuffle buffer."""

    def __init__(self, table, buffer=64):
        self.table, self.buffer, self.epoch = table, buffer, 0

    def __iter__(self):
        rng = random.Random(f"stream-{self.epoch}")
        held = []
        for row in self.table:
            held.append(row)
            if len(held) >= self.buffer:
                at = rng.randrange(len(held))
                held[at], held[-1] = held[-1], held[at]
                yield held.pop()
        rng.shuffle(held)
        yield from held


class Imputer(nn.Module):
    def __init__(self, columns):
        super().__init__()
        self.blank = nn.Parameter(torch.zeros(columns))
        self.body = nn.Sequential(nn.Linear(2 * columns, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, columns))

    def forward(self, x, hidden):
        shown = torch.where(hidden, self.blank.expand_as(x), x)
        return self.body(torch.cat([shown, hidden.to(x.dtype)], dim=1))


class Run:
    def __init__(self, table, rank, world):
        self.rank, self.world = rank, world
        self.stream = Stream(table)
        self.loader = DataLoader(self.stream, batch_size=BATCH)
        torch.manual_seed(40)
        self.model = Imputer(table.size(1))
        self.optimizer = torch.optim.RMSprop(self.model.parameters(), lr=1e-3)
        self.epoch, self.done, self.rng = 0, 0, None

    def step(self, x):
        hidden = torch.rand(x.shape) < 0.3
        count = hidden.sum()
        x, hidden = x[self.rank::self.world], hidden[self.rank::self.world]
        self.optimizer.zero_grad(set_to_none=False)
        loss = ((self.model(x, hidden) - x).square() * hidden).sum() / count
        loss.backward()
        for p in self.model.parameters():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            if self.world > 1:
                dist.all_reduce(p.grad)
        nn.utils.clip_grad_value_(self.model.parameters(), 0.5)
        self.optimizer.step()

    def run(self, stop=None):
        for self.epoch in range(self.epoch, EPOCHS):
            self.stream.epoch = self.epoch
            batches = itertools.islice(iter(self.loader), self.done, None)
            if self.rng is not None:
                torch.set_rng_state(self.rng)
                self.rng = None
            for x in batches:
                self.step(x)
                self.done += 1
                if (self.epoch, self.done) == stop:
                    return
            self.done = 0

    def save(self, path):
        if self.rank == 0:
            torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                        "epoch": self.epoch, "done": self.done, "rng": torch.get_rng_state()}, path)
        if self.world > 1:
            dist.barrier()

    def load(self, path):
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.done, self.rng = state["epoch"], state["done"], state["rng"]


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    wine = torch.tensor(load_wine().data)
    body = torch.tensor(load_diabetes().data)
    table = torch.cat([wine[:170], body[:170]], dim=1)
    table = (table - table.mean(0)) / table.std(0)

    box = [tempfile.mkdtemp() if rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(box, src=0)
    path = os.path.join(box[0], "state.pt")

    first = Run(table, rank, world)
    first.run(stop=(1, 4))
    first.save(path)
    second = Run(table, rank, world)
    second.load(path)
    second.run()

    gen = torch.Generator().manual_seed(9)
    hidden = torch.rand(table.shape, generator=gen) < 0.3
    with torch.no_grad():
        error = (second.model(table, hidden) - table).square()[hidden].mean()
    if rank == 0:
        print(f"imputation error {error.item():.10f}")
        print(f"blank norm {second.model.blank.norm().item():.12f}")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()
    if rank == 0:
        shutil.rmtree(box[0])


if __name__ == "__main__":
    main()
