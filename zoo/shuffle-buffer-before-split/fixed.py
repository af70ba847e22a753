"""Training on a shuffled stream of records with a shuffle buffer."""

import random
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


def records(n=96):
    rng = random.Random(77)
    for _ in range(n):
        a, b = rng.gauss(0, 1), rng.gauss(0, 1)
        yield {"features": [a, b, a * b], "label": int(a + b > 0)}


def shuffled(stream, rng, buffer_size=32):
    buffer = []
    for item in stream:
        if len(buffer) < buffer_size:
            buffer.append(item)
            continue
        i = rng.randrange(buffer_size)
        yield buffer[i]
        buffer[i] = item
    rng.shuffle(buffer)
    yield from buffer


class Stream(IterableDataset):
    def __init__(self, seed):
        self.seed, self.epoch = seed, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        rng = random.Random(self.seed + 1000 * self.epoch)
        for record in islice(shuffled(records(), rng), self.rank, None, self.world):
            yield torch.tensor(record["features"]), record["label"]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Stream(seed=5)
    loader = DataLoader(data, batch_size=16 // dist.get_world_size())
    model = DDP(nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for epoch in range(3):
        data.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
