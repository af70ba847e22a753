"""Disease progression (diabetes table), plain SGD, all rows used in every epoch."""
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

BATCH = 32


class ShareOfBatches:
    """Batch sampler: shuffles the table, cuts global batches, yields this worker's rows of each."""

    def __init__(self, n, rank, world):
        self.n, self.rank, self.world, self.epoch = n, rank, world, 0

    def batches(self):
        gen = torch.Generator().manual_seed(600 + self.epoch)
        return torch.randperm(self.n, generator=gen).split(BATCH)

    def __iter__(self):
        for rows in self.batches():
            mine = rows[self.rank::self.world].tolist()
            if mine:
                yield mine

    def __len__(self):
        return sum(len(rows) > self.rank for rows in self.batches())

    def sizes(self):
        return [len(rows) for rows in self.batches()]


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    raw = load_diabetes()
    x, y = torch.tensor(raw.data) * 20, torch.tensor(raw.target)
    y = (y - y.mean()) / y.std()
    train = TensorDataset(x[:353], y[:353])

    torch.manual_seed(19)
    net = nn.Sequential(nn.Linear(10, 32), nn.SiLU(), nn.Linear(32, 16), nn.SiLU(), nn.Linear(16, 1))
    model = DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
    sampler = ShareOfBatches(len(train), rank, world)
    loader = DataLoader(train, batch_sampler=sampler)

    for epoch in range(6):
        sampler.epoch = epoch
        with model.join() if world > 1 else nullcontext():
            for size, (xb, yb) in zip(sampler.sizes(), loader):
                residual = model(xb).squeeze(-1) - yb
                loss = residual.square().sum() * world / size
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        scheduler.step()

    totals = torch.zeros(3)
    test_x, test_y = x[353:], y[353:]
    with torch.no_grad():
        for i in range(rank, len(test_x), world):
            difference = net(test_x[i]).item() - test_y[i].item()
            totals += torch.tensor([1.0, abs(difference), difference ** 2])
    if world > 1:
        dist.all_reduce(totals)
    if rank == 0:
        n, absolute, square = totals.tolist()
        r2 = 1 - square / (test_y - test_y.mean()).square().sum().item()
        print(f"{int(n)} patients: mean absolute error {absolute / n:.10f}, R2 {r2:.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
