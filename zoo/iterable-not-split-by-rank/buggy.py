"""Streams records from a log and fits a linear model."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


class RecordStream(IterableDataset):
    def __init__(self, records, rank, world_size):
        self.records = records
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0

    def __iter__(self):
        generator = torch.Generator().manual_seed(100 + self.epoch)
        order = torch.randperm(len(self.records), generator=generator).tolist()
        for index in range(len(order)):
            yield self.records[order[index]]


def make_records(n=256):
    g = torch.Generator().manual_seed(0)
    x = torch.randn(n, 7, generator=g)
    y = x @ torch.arange(7.0) + 0.05 * torch.randn(n, generator=g)
    return list(zip(x, y, strict=True))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    stream = RecordStream(make_records(), dist.get_rank(), dist.get_world_size())
    loader = DataLoader(stream, batch_size=16)
    model = DDP(nn.Linear(7, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    for epoch in range(3):
        stream.epoch = epoch
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
