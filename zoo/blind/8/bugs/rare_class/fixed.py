"""Imbalanced classification: the rare class is drawn more often."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset, WeightedRandomSampler

BATCH, EPOCHS, SEED = 64, 6, 12


class EveryNth(Sampler):
    """Every n-th index of another sampler."""

    def __init__(self, sampler, n, first):
        self.sampler, self.n, self.first = sampler, n, first

    def __iter__(self):
        return iter(list(self.sampler)[self.first::self.n])

    def __len__(self):
        return len(range(self.first, len(self.sampler), self.n))


def tables():
    x, y = make_classification(n_samples=1680, n_features=16, n_informative=8, n_redundant=2, weights=[0.92, 0.08],
                               class_sep=0.8, flip_y=0.02, random_state=SEED)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    return TensorDataset(x[:1280], y[:1280]), TensorDataset(x[1280:], y[1280:])


def train_loader(data, rank, world):
    y = data.tensors[1]
    weights = 1.0 / torch.bincount(y).double()
    sampler = WeightedRandomSampler(weights[y], len(data), generator=torch.Generator().manual_seed(SEED))
    if world > 1:
        sampler = EveryNth(sampler, world, rank)
    return DataLoader(data, batch_size=BATCH // world, sampler=sampler, drop_last=True)


def evaluate(model, loader):
    table = torch.zeros(2, 2)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            for truth, guess in zip(y, model(x).argmax(1)):
                table[truth, guess] += 1
    model.train()
    dist.all_reduce(table)
    return table


def main():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29823")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, test = tables()
    loader = train_loader(train, rank, world)
    test_loader = DataLoader(test, batch_size=100, sampler=EveryNth(range(len(test)), world, rank))

    torch.manual_seed(SEED)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2))
    model = DDP(net)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    for epoch in range(EPOCHS):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item() * len(y), len(y)])
        dist.all_reduce(total)
        table = evaluate(net, test_loader)
        recall = table.diag() / table.sum(1)
        if rank == 0:
            print(f"epoch {epoch} loss {total[0] / total[1]:.5f} recall {recall[0]:.4f} {recall[1]:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
