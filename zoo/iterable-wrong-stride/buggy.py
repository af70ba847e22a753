"""Trains a next-value predictor on a stream of measurements read by two workers."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

WORKERS = 2


class Measurements(IterableDataset):
    def __init__(self, n, rank, world_size):
        g = torch.Generator().manual_seed(3)
        self.values = torch.randn(n, 9, generator=g).cumsum(1) / 3
        self.rank, self.world_size = rank, world_size

    def __iter__(self):
        info = get_worker_info()
        workers, worker = info.num_workers, info.id
        start = self.rank * workers + worker
        for i in range(start, len(self.values), workers):
            row = self.values[i]
            yield row[:-1], row[-1:]


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    stream = Measurements(256, rank, world_size)
    loader = DataLoader(stream, batch_size=8, num_workers=WORKERS, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for x, y in loader:
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if len(losses) == 14:
            break
    if rank == 0:
        print(f"{len(losses)} steps, loss {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
