"""Handwritten digits with a small conv net, DDP and a one-cycle learning rate."""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build_net():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * 16, 10),
    )


def datasets():
    d = load_digits()
    images = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(d.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    images, labels = images[order], labels[order]
    return TensorDataset(images[:1152], labels[:1152]), TensorDataset(images[1152:1792], labels[1152:1792])


@torch.no_grad()
def accuracy(net, data, rank, world):
    x, y = data.tensors
    right = (net(x[rank::world]).argmax(1) == y[rank::world]).sum()
    dist.all_reduce(right)
    return right.item() / len(data)


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--global-batch", type=int, default=96)
    ap.add_argument("--max-lr", type=float, default=0.12)
    ap.add_argument("--seed", type=int, default=5)
    args = ap.parse_args()

    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29645", rank=rank, world_size=world)

    torch.manual_seed(args.seed)
    train_set, test_set = datasets()
    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, shuffle=True, seed=args.seed)
    loader = DataLoader(train_set, batch_size=args.global_batch // world, sampler=sampler, drop_last=True)

    model = DistributedDataParallel(build_net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    total_steps = args.epochs * (len(train_set) // loader.batch_size)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.max_lr, total_steps=total_steps, pct_start=0.25)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(2)
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            running += torch.tensor([loss.item() * len(images), len(images)])
        dist.all_reduce(running)
        acc = accuracy(model.module, test_set, rank, world)
        if rank == 0:
            print(f"epoch {epoch}  loss {running[0] / running[1]:.5f}  test accuracy {acc:.4f}")

    if rank == 0:
        weights = torch.cat([p.detach().flatten() for p in model.parameters()])
        print(f"finished: {acc:.4f} correct, weight norm {weights.norm():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
