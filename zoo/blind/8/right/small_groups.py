import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import BatchSampler, DataLoader, TensorDataset

GROUP, BATCH = 16, 64


class GroupedBatchNorm(nn.BatchNorm1d):
    """Batch normalisation over groups of sixteen rows (ghost batches), in training and in evaluation."""

    def __init__(self, features):
        super().__init__(features, track_running_stats=False)

    def forward(self, x):
        return torch.cat([super(GroupedBatchNorm, self).forward(part) for part in x.split(GROUP)])


def build():
    return nn.Sequential(
        nn.Linear(64, 48, bias=False), GroupedBatchNorm(48), nn.ReLU(),
        nn.Linear(48, 24, bias=False), GroupedBatchNorm(24), nn.ReLU(),
        nn.Linear(24, 10))


class Order:
    """The row numbers of this process, batch after batch."""

    def __init__(self, n, rank, world):
        self.n, self.rank, self.world, self.epoch = n, rank, world, 0

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order.view(-1, self.world, BATCH // self.world)[:, self.rank].flatten().tolist())

    def __len__(self):
        return self.n // self.world


def main(epochs=5):
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29859")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16, dtype=torch.float32), torch.tensor(digits.target)
    order = Order(1408, rank, world)
    data = TensorDataset(x[:1408], y[:1408])
    loader = DataLoader(data, batch_sampler=BatchSampler(order, BATCH // world, drop_last=False))

    torch.manual_seed(33)
    model = DDP(build())
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(epochs):
        order.epoch = epoch
        total = torch.zeros(())
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach() * len(xb)
        dist.all_reduce(total)
        with torch.no_grad():
            test = F.cross_entropy(model.module(x[1408:1792]), y[1408:1792])
        if rank == 0:
            print(f"epoch {epoch} train {total.item() / 1408:.5f} test {test.item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
