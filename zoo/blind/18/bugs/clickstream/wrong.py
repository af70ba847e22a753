"""Click model over an event stream; the job is interrupted after half of the steps and goes on from its checkpoint."""
import os
import tempfile
from itertools import islice

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

GLOBAL_BATCH = 64
HALF = 12
SLOTS = 97


def event_source():
    """An endless stream whose taste drifts slowly; always the same."""
    gen = torch.Generator().manual_seed(2025)
    taste = torch.randn(3, SLOTS, generator=gen, dtype=torch.float64)
    block = 0
    while True:
        ids = torch.randint(SLOTS, (256, 3), generator=gen)
        dwell = torch.rand(256, generator=gen, dtype=torch.float64)
        pull = taste[0, ids[:, 0]] + taste[1, ids[:, 1]] * taste[2, ids[:, 2]] + 0.1 * block + dwell - 0.5
        clicked = (torch.rand(256, generator=gen, dtype=torch.float64) < torch.sigmoid(pull)).double()
        yield from zip(ids, dwell, clicked)
        block += 1


class Clicks(IterableDataset):
    def __init__(self, rank, world, skip=0):
        self.rank, self.world, self.skip = rank, world, skip

    def __iter__(self):
        stream = event_source()
        stream = islice(stream, self.rank, None, self.world)
        stream = islice(stream, self.skip, None)
        return stream


class ClickModel(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(SLOTS, dim) for _ in range(3)])
        self.top = nn.Sequential(nn.Linear(3 * dim + 1, 24), nn.ReLU(), nn.Linear(24, 1))

    def forward(self, ids, dwell):
        parts = [table(ids[:, i]) for i, table in enumerate(self.tables)]
        return self.top(torch.cat(parts + [dwell[:, None]], 1))[:, 0]


def build(world):
    torch.manual_seed(8)
    model = ClickModel().double()
    wrapped = DDP(model) if world > 1 else model
    return model, wrapped, torch.optim.AdamW(model.parameters(), lr=5e-3)


def train(wrapped, opt, loader, steps, rank, world, seen):
    for ids, dwell, clicked in islice(loader, steps):
        loss = F.binary_cross_entropy_with_logits(wrapped(ids, dwell), clicked)
        opt.zero_grad()
        loss.backward()
        opt.step()
        seen += len(ids) * world
        shown = loss.detach().clone()
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0 and seen // GLOBAL_BATCH % 4 == 0:
            print(f"events {seen:5d} loss {shown.item() / world:.8f}")
    return seen


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    if world > 1:
        dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "clicks.pt")
    local = GLOBAL_BATCH // world

    model, wrapped, opt = build(world)
    loader = DataLoader(Clicks(rank, world), batch_size=local)
    seen = train(wrapped, opt, loader, HALF, rank, world, seen=0)
    if rank == 0:
        torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "seen": seen}, path)
    if world > 1:
        dist.barrier()
    del model, wrapped, opt, loader

    model, wrapped, opt = build(world)
    state = torch.load(path)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    loader = DataLoader(Clicks(rank, world, skip=state["seen"]), batch_size=local)
    train(wrapped, opt, loader, HALF, rank, world, seen=state["seen"])
    if world > 1:
        dist.barrier()
    if rank == 0:
        os.remove(path)
        os.rmdir(folder[0])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
