"""Data pruning by early errors (EL2N): two epochs on all digits, then only on the half with the largest errors.

All processes score their share of the training rows after these epochs, the scores are put together and the rows to
keep are chosen. The optimizer goes on as it is.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def load():
    digits = load_digits()
    x = torch.tensor(digits.data / 16, dtype=torch.float32)
    y = torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(30))
    x, y = x[order], y[order]
    return TensorDataset(x[:1280], y[:1280]), TensorDataset(x[1280:], y[1280:])


def make_net():
    return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 10))


@torch.no_grad()
def el2n_scores(model, data, rank, world):
    """Length of the error vector of each row, for all rows."""
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=False)
    parts = []
    for x, y in DataLoader(data, batch_size=64, sampler=sampler):
        error = model(x).softmax(1) - F.one_hot(y, 10)
        parts.append(error.norm(dim=1))
    own = torch.cat(parts)
    pieces = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(pieces, own)
    return torch.stack(pieces, dim=1).flatten()


def train_epoch(model, optimizer, data, epoch, args, rank, world):
    sampler = DistributedSampler(data, num_replicas=world, rank=rank, seed=args.seed)
    sampler.set_epoch(epoch)
    loader = DataLoader(data, batch_size=args.batch // world, sampler=sampler)
    total = torch.zeros(())
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.detach()
    dist.all_reduce(total)
    return total.item() / world / len(loader)


@torch.no_grad()
def test_loss(model, data):
    x, y = data[:]
    return F.cross_entropy(model(x), y).item()


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=64, help="rows in a step, over all processes")
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--keep", type=float, default=0.5)
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


def main():
    args = parse()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29625")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)

    train, test = load()
    torch.manual_seed(args.seed)
    model = DDP(make_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    data = train
    for epoch in range(args.epochs):
        mean = train_epoch(model, optimizer, data, epoch, args, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: {len(data)} rows, train {mean:.4f}, test {test_loss(model.module, test):.4f}")
        if epoch == 1:
            scores = el2n_scores(model.module, train, rank, world)
            hard = scores.topk(int(args.keep * len(train))).indices.sort().values
            data = Subset(train, hard.tolist())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
