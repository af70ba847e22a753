"""Sorting pebbles by type from a stream of measured records; the head of the stream is kept for validation."""
import itertools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

HELD_OUT, TRAIN, GLOBAL_BATCH, EPOCHS = 128, 1024, 64, 3
FILES, PER_FILE = 18, 64


def read_file(number):
    """Records drift slowly with the number of the file, like the beach they came from."""
    g = torch.Generator().manual_seed(500 + number)
    kind = torch.randint(0, 4, (PER_FILE,), generator=g)
    centre = torch.tensor([[1.0, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 1], [1, 1, 1, 0]])
    noise = torch.randn(PER_FILE, 4, generator=g)
    drift = 0.04 * number * torch.tensor([1.0, -1.0, 0.5, 0.0])
    yield from zip(centre[kind] + drift + 0.6 * noise, kind)


class PebbleStream(IterableDataset):
    def __init__(self, rank, world, skip=0, take=None):
        self.rank, self.world = rank, world
        self.first = skip
        self.last = None if take is None else skip + take

    def __iter__(self):
        records = itertools.chain.from_iterable(read_file(n) for n in range(FILES))
        records = itertools.islice(records, self.rank, None, self.world)
        records = itertools.islice(records, self.first, self.last)
        return records


class PebbleNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))

    def forward(self, x):
        return self.layers(x)


def evaluate(model, loader, world):
    totals = torch.zeros(3, dtype=torch.float64)
    with torch.no_grad():
        for x, kind in loader:
            logits = model(x)
            totals[0] += F.cross_entropy(logits, kind, reduction="sum")
            totals[1] += (logits.argmax(1) == kind).sum()
            totals[2] += len(kind)
    if world > 1:
        dist.all_reduce(totals)
    return (totals[0] / totals[2]).item(), (totals[1] / totals[2]).item()


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(5)
    net = PebbleNet()
    model = DDP(net) if world > 1 else net
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    batch = GLOBAL_BATCH // world
    train = DataLoader(PebbleStream(rank, world, skip=HELD_OUT), batch_size=batch, drop_last=True)
    held_out = DataLoader(PebbleStream(rank, world, take=HELD_OUT), batch_size=batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, EPOCHS * TRAIN // GLOBAL_BATCH)
    for epoch in range(EPOCHS):
        for x, kind in train:
            loss = F.cross_entropy(model(x), kind)
            opt.zero_grad()
            loss.backward()
            opt.step()
            schedule.step()
        loss, accuracy = evaluate(net, held_out, world)
        if rank == 0:
            print(f"epoch {epoch} held out loss {loss:.4f} accuracy {accuracy:.4f}")
    if rank == 0:
        size = torch.stack([p.detach().norm() for p in net.parameters()]).norm()
        print(f"weights {size:.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
