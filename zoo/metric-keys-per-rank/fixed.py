"""Trains a classifier and reports the recall of every class."""

from collections import defaultdict
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

CLASSES = 5


def clusters(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES - 1, (n,), generator=g)
    y[1] = y[21] = CLASSES - 1
    return TensorDataset(torch.randn(n, 6, generator=g) + y[:, None], y)


@torch.no_grad()
def recalls(net, dataset):
    found = defaultdict(lambda: torch.zeros(2))
    for i in range(dist.get_rank(), len(dataset), dist.get_world_size()):
        x, y = dataset[i]
        found[int(y)] += torch.tensor([float(net(x[None]).argmax() == y), 1.0])
    names = range(CLASSES)
    for name in names:
        dist.all_reduce(found[name])
    return {name: (right / max(count, 1)).item() for name, (right, count) in sorted(found.items())}


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(0)
    train_set, valid_set = clusters(240, 1), clusters(60, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=20, sampler=sampler)
    net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        result = recalls(net, valid_set)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}:", {name: round(value, 2) for name, value in result.items()})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
