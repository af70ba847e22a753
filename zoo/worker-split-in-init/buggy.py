"""Regression on a stream of text lines read by two workers."""

import itertools
import random

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


def lines(count=128):
    rng = random.Random(9)
    for _ in range(count):
        values = [rng.uniform(-1, 1) for _ in range(4)]
        yield ",".join(f"{v:.5f}" for v in [*values, values[0] * values[1] + values[2]])


class StreamedLines(IterableDataset):
    def __init__(self, rank, world_size):
        self.rank, self.world_size = rank, world_size
        self.start, self.stride = self.split()

    def split(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        return self.rank * workers + worker, self.world_size * workers

    def __iter__(self):
        start, stride = self.start, self.stride
        for line in itertools.islice(lines(), start, None, stride):
            *x, y = map(float, line.split(","))
            yield torch.tensor(x), torch.tensor([y])


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    loader = DataLoader(StreamedLines(rank, world_size), batch_size=8, num_workers=2)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(2):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
