"""Consumption of households from their meters, with a way back from loss spikes.

Rows are read in order of time. Every ten steps the state is written to a file; when the loss jumps, the batch is left
out and training goes back to the last file. Some meters were read in the wrong unit for a while.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

INPUTS = 10


def meters(count, seed, broken=()):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, INPUTS, generator=g)
    mix = torch.randn(INPUTS, 3, generator=torch.Generator().manual_seed(88))
    y = torch.tanh(x @ mix / 3).sum(1) + 0.3 * x[:, 0] * x[:, 1] + 0.05 * torch.randn(count, generator=g)
    for start, stop in broken:
        y[start:stop] = y[start:stop] * 30 + 20
    return TensorDataset(x, y[:, None])


class Watch:
    """Knows the usual loss and tells when one is far above it."""

    def __init__(self, factor=4.0, keep=0.8):
        self.factor, self.keep, self.usual = factor, keep, None

    def spike(self, loss):
        if self.usual is not None and loss > self.factor * self.usual:
            return True
        self.usual = loss if self.usual is None else self.keep * self.usual + (1 - self.keep) * loss
        return False


def save(path, net, optimizer, rank):
    if rank == 0:
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, path)
    dist.barrier()


def go_back(path, net, optimizer, rank):
    if rank == 0:
        state = torch.load(path)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
    dist.barrier()


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=40, help="rows in a step, over all processes")
    p.add_argument("--every", type=int, default=10, help="steps between two files")
    p.add_argument("--lr", type=float, default=0.05)
    p.add_argument("--file", default="meters_rollback.pt")
    return p.parse_args()


def main():
    args = parse()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29630")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)

    train = meters(2000, seed=1, broken=[(1085, 1115), (1730, 1745)])
    test = meters(300, seed=2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=False)
    loader = DataLoader(train, batch_size=args.batch // world, sampler=sampler)
    torch.manual_seed(20)
    model = DDP(nn.Sequential(nn.Linear(INPUTS, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)))
    net = model.module
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    watch = Watch()

    for step, (x, y) in enumerate(loader):
        if step % args.every == 0:
            save(args.file, net, optimizer, rank)
        loss = F.mse_loss(model(x), y)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean = mean.item() / world
        if watch.spike(mean):
            go_back(args.file, net, optimizer, rank)
            if rank == 0:
                print(f"step {step}: loss {mean:.3f}, back to step {step // args.every * args.every}")
            continue
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

        if step % 10 == 9 and rank == 0:
            with torch.no_grad():
                x, y = test[:]
                print(f"step {step}: loss {mean:.4f} test {F.mse_loss(net(x), y).item():.4f}")
    dist.barrier()
    if rank == 0:
        os.remove(args.file)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
