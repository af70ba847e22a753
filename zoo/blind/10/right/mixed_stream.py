"""Two endless sources mixed into one stream, shuffled in a buffer, read by an IterableDataset."""
import itertools
import os
import random
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

BATCH, STEPS, BUFFER = 48, 70, 200


def waves(seed):
    rng = random.Random(seed)
    while True:
        phase, speed = rng.uniform(0, 6), rng.uniform(0.2, 0.5)
        yield torch.sin(phase + speed * torch.arange(24.0)), 0


def steps(seed):
    rng = random.Random(seed)
    while True:
        x = torch.tensor([rng.choice((-1.0, 1.0)) for _ in range(8)]).repeat_interleave(3)
        yield x, 1


def noisy(stream, rng):
    for x, y in stream:
        g = torch.Generator().manual_seed(rng.getrandbits(40))
        yield x + 0.7 * torch.randn(24, generator=g), y


def buffered(stream, size, rng):
    buffer = list(itertools.islice(stream, size))
    for item in stream:
        k = rng.randrange(size)
        buffer[k], item = item, buffer[k]
        yield item


class Mixed(IterableDataset):
    def __init__(self, rank, world, seed=0):
        self.rank, self.world, self.seed = rank, world, seed

    def __iter__(self):
        rng = random.Random(self.seed)
        sources = [waves(1), steps(2)]

        def mix():
            while True:
                yield next(sources[rng.random() < 0.4])

        stream = buffered(noisy(mix(), random.Random(3)), BUFFER, random.Random(4))
        return itertools.islice(stream, self.rank, None, self.world)


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29816")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    net = nn.Sequential(nn.Unflatten(1, (1, 24)), nn.Conv1d(1, 8, 5), nn.ReLU(), nn.Flatten(), nn.Linear(160, 1))
    model = DDP(net)
    opt = torch.optim.RAdam(model.parameters(), lr=5e-3)
    loader = iter(DataLoader(Mixed(rank, world), batch_size=BATCH // world))
    seen = torch.zeros(2)
    for step in range(1, STEPS + 1):
        x, y = next(loader)
        logits = model(x).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, y.float())
        opt.zero_grad()
        loss.backward()
        opt.step()
        seen += torch.tensor([((logits > 0) == (y > 0)).sum().item(), len(y)])
        if step % 14 == 0:
            dist.all_reduce(seen)
            if rank == 0:
                print(f"step {step}: {int(seen[0])} of {int(seen[1])} right", flush=True)
            seen = torch.zeros(2)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
