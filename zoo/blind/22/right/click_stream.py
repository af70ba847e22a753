"""Click prediction from an endless log: iterable dataset with workers, sparse embedding gradients, DDP."""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

ITEMS, USERS, BATCH, STEPS = 200, 80, 64, 50


def event(number, split):
    """One line of the log: user, up to six viewed items, clicked or not."""
    rng = np.random.default_rng((split, number))
    user = int(rng.integers(USERS))
    items = rng.integers(ITEMS, size=int(rng.integers(1, 7)))
    taste = np.mean(np.cos(0.7 * items + 0.3 * user)) + 0.5 * np.sin(user)
    return user, items, float(rng.random() < 1 / (1 + np.exp(-3 * taste)))


class Log(IterableDataset):
    """Yields this process' part of every global batch; the workers take the batches in turn."""

    def __init__(self, split, steps, rank, world):
        self.split, self.steps, self.rank, self.world = split, steps, rank, world

    def __iter__(self):
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        for step in range(first, self.steps, stride):
            numbers = range(step * BATCH + self.rank, (step + 1) * BATCH, self.world)
            yield self.collate([event(n, self.split) for n in numbers])

    @staticmethod
    def collate(events):
        users, items, clicks = zip(*events)
        lengths = torch.tensor([len(i) for i in items])
        offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
        return torch.tensor(users), torch.from_numpy(np.concatenate(items)), offsets, torch.tensor(clicks)


class ClickModel(nn.Module):
    def __init__(self, dim=12):
        super().__init__()
        self.users = nn.Embedding(USERS, dim, sparse=True)
        self.items = nn.EmbeddingBag(ITEMS, dim, mode="mean", sparse=True)
        self.top = nn.Sequential(nn.Linear(3 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, user, items, offsets):
        u, v = self.users(user), self.items(items, offsets)
        return self.top(torch.cat([u, v, u * v], 1)).squeeze(1)


@torch.no_grad()
def evaluate(model, rank, world):
    sums = torch.zeros(4, dtype=torch.float64)
    for user, items, offsets, click in DataLoader(Log(2, 8, rank, world), batch_size=None):
        logit = model(user, items, offsets)
        sums[0] += F.binary_cross_entropy_with_logits(logit, click, reduction="sum")
        sums[1] += logit.sigmoid().sum()
        sums[2] += click.sum()
        sums[3] += len(click)
    if world > 1:
        dist.all_reduce(sums)
    return sums[0] / sums[3], sums[1] / sums[2]


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(33)
    model = ClickModel()
    net = DDP(model) if world > 1 else model
    tables = [model.users.weight, model.items.weight]
    sparse = torch.optim.SparseAdam(tables, lr=2e-2)
    dense = torch.optim.Adam(model.top.parameters(), lr=3e-3)

    loader = DataLoader(Log(1, STEPS, rank, world), batch_size=None, num_workers=2)
    for step, (user, items, offsets, click) in enumerate(loader, 1):
        loss = F.binary_cross_entropy_with_logits(net(user, items, offsets), click)
        sparse.zero_grad()
        dense.zero_grad()
        loss.backward()
        sparse.step()
        dense.step()
        if step % 25 == 0:
            log_loss, calibration = evaluate(model, rank, world)
            if rank == 0:
                print(f"step {step} test log loss {log_loss:.5f} calibration {calibration:.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
