"""Click rates of adverts with a factorisation machine and a small network (DeepFM), and how well they are calibrated.

Calibration is measured with ten bins that hold equally many shows. The test shows are those of the last days, in order
of time, and each process scores a stretch of them.
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

FIELDS = (12, 20, 8, 24)
BINS = 10


def shows(count, seed, late=0.0):
    """User group, advert, slot, hour, and whether it was clicked; people tire of adverts as time goes on."""
    shared = torch.Generator().manual_seed(60)
    taste = [torch.randn(size, 3, generator=shared) for size in FIELDS]
    g = torch.Generator().manual_seed(seed)
    x = torch.stack([torch.randint(size, (count,), generator=g) for size in FIELDS], 1)
    x[:, 3] = torch.arange(count) * FIELDS[3] // count
    hidden = [table[column] for table, column in zip(taste, x.T)]
    logit = (hidden[0] * hidden[1]).sum(1) + 0.8 * hidden[2][:, 0] + 0.8 * hidden[3][:, 1] - 1 - late
    return x, (torch.rand(count, generator=g) < torch.sigmoid(logit)).float()


class DeepFM(nn.Module):
    def __init__(self, width=6):
        super().__init__()
        self.linear = nn.ModuleList(nn.Embedding(size, 1) for size in FIELDS)
        self.factor = nn.ModuleList(nn.Embedding(size, width) for size in FIELDS)
        self.deep = nn.Sequential(nn.Linear(width * len(FIELDS), 24), nn.ReLU(), nn.Linear(24, 1))
        for table in (*self.linear, *self.factor):
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, x):
        first = sum(table(column) for table, column in zip(self.linear, x.T)).squeeze(1)
        v = torch.stack([table(column) for table, column in zip(self.factor, x.T)], 1)
        second = (v.sum(1).square() - v.square().sum(1)).sum(1) / 2
        return first + second + self.deep(v.flatten(1)).squeeze(1)


@torch.no_grad()
def evaluate(model, x, clicked, rank, world):
    """Log loss and expected calibration error over all test shows."""
    size = len(x) // world
    own = slice(rank * size, (rank + 1) * size)
    logits, clicked = model(x[own]), clicked[own]
    rate = torch.sigmoid(logits)
    loss = F.binary_cross_entropy_with_logits(logits, clicked, reduction="sum")

    pieces = [torch.empty_like(rate) for _ in range(world)]
    dist.all_gather(pieces, rate)
    scored = torch.cat(pieces)
    edges = torch.quantile(scored, torch.linspace(0, 1, BINS + 1)[1:-1])
    place = torch.bucketize(rate, edges)
    bins = torch.zeros(BINS, 3)
    bins.index_add_(0, place, torch.stack([torch.ones_like(rate), rate, clicked], 1))
    dist.all_reduce(bins)
    dist.all_reduce(loss)
    error = (bins[:, 1] - bins[:, 2]).abs().sum() / bins[:, 0].sum()
    return loss.item() / len(x), error.item()


def main(epochs=3, batch=80):
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29628")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)

    train = TensorDataset(*shows(1200, seed=1))
    x_test, clicked = shows(800, seed=2, late=0.4)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=3)
    loader = DataLoader(train, batch_size=batch // world, sampler=sampler)
    torch.manual_seed(18)
    model = DistributedDataParallel(DeepFM())
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1, eps=1e-6)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            loss = F.binary_cross_entropy_with_logits(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.detach()
        dist.all_reduce(total)
        value, error = evaluate(model.module, x_test, clicked, rank, world)
        if rank == 0:
            mean = total.item() / world / len(loader)
            print(f"epoch {epoch}: train {mean:.4f} test {value:.4f} calibration error {error:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
