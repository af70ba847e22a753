"""Stochastic weight averaging of a small convolutional net on synthetic images."""

import argparse

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (n,), generator=g)
    x = torch.randn(n, 1, 8, 8, generator=g) * (1 + y.view(-1, 1, 1, 1)) + y.view(-1, 1, 1, 1)
    return TensorDataset(x, y)


def net():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 3 * 3, 3)
    )


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    stats = torch.zeros(3, dtype=torch.float64)
    for x, y in loader:
        out = model(x)
        stats += torch.tensor(
            [nn.functional.cross_entropy(out, y, reduction="sum").item(), (out.argmax(1) == y).sum().item(), len(y)]
        )
    dist.all_reduce(stats)
    return (stats[0] / stats[2]).item(), (stats[1] / stats[2]).item()


def main(args):
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    train, val = images(96, 1), images(40, 2)
    sampler = DistributedSampler(train)
    loader = DataLoader(train, args.batch_size // world, sampler=sampler)
    bn_loader = DataLoader(train, args.batch_size)
    val_loader = DataLoader(val, 10, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(net())
    swa_model = AveragedModel(model.module)
    optimizer = optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    swa_scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if epoch >= args.swa_start:
            swa_model.update_parameters(model.module)
            swa_scheduler.step()
    update_bn(bn_loader, swa_model)
    loss, acc = evaluate(swa_model, val_loader)
    if dist.get_rank() == 0:
        print(f"swa: val loss {loss:.6f} val acc {acc:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--swa-start", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=16)
    main(parser.parse_args())
