"""Autoencoder on digits. A meter keeps the running reconstruction error since the start of the epoch."""
import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler


class Meter:
    """Sum and count over all ranks."""

    def __init__(self):
        self.totals = torch.zeros(2, dtype=torch.float64)

    def reset(self):
        self.totals.zero_()

    def update(self, value, n):
        self.totals += torch.tensor([value * n, n], dtype=torch.float64)

    def value(self):
        totals = self.totals.clone()
        dist.all_reduce(totals)
        return (totals[0] / totals[1]).item()


class Digits(Dataset):
    def __init__(self, part):
        images = torch.tensor(load_digits().data, dtype=torch.float32) / 16
        self.images = images[:1536] if part == "train" else images[1536:]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i]


class ShardedBatches(Sampler):
    """Batches of the whole job, of which this rank takes every world-th row."""

    def __init__(self, n, batch, seed):
        self.n, self.batch, self.seed, self.epoch = n, batch, seed, 0

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        self.epoch += 1
        for chunk in order.split(self.batch):
            yield chunk[dist.get_rank()::dist.get_world_size()].tolist()


def autoencoder():
    torch.manual_seed(14)
    return nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 12), nn.GELU(),
                         nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 64), nn.Sigmoid())


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=96)
    ap.add_argument("--log-every", type=int, default=4)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    train = Digits("train")
    loader = DataLoader(train, batch_sampler=ShardedBatches(len(train), args.batch, 70))
    model = DDP(autoencoder())
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3, eps=1e-5)
    meter, curve = Meter(), []
    for epoch in range(args.epochs):
        meter.reset()
        for i, x in enumerate(loader):
            loss = ((model(x) - x) ** 2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            meter.update(loss.item(), len(x))
            if (i + 1) % args.log_every == 0:
                curve.append(meter.value())
                if rank == 0:
                    print(f"epoch {epoch} batch {i + 1:2d} running error {curve[-1]:.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
