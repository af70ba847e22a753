"""Small CNN on digits, ZeroRedundancyOptimizer, learning rate halved when the validation loss stalls."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def get_parser():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=7)
    p.add_argument("--batch-size", type=int, default=80, help="global batch size")
    p.add_argument("--lr", type=float, default=0.2)
    p.add_argument("--label-noise", type=float, default=0.6)
    return p


def build_data(noise):
    d = load_digits()
    g = torch.Generator().manual_seed(11)
    x = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(d.target)
    flip = torch.rand(len(y), generator=g) < noise
    y = torch.where(flip, torch.randint(0, 10, y.shape, generator=g), y)
    ds = TensorDataset(x, y)
    perm = torch.randperm(len(ds), generator=g).tolist()
    return Subset(ds, perm[:640]), Subset(ds, perm[640:700])


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(24 * 16, 10),
    )


@torch.no_grad()
def validate(model, subset, rank, world):
    model.eval()
    rows = range(rank, len(subset), world)
    x = torch.stack([subset[i][0] for i in rows])
    y = torch.stack([subset[i][1] for i in rows])
    total = nn.functional.cross_entropy(model.module(x), y, reduction="sum")
    stats = torch.tensor([total.item(), float(len(y))])
    model.train()
    return (stats[0] / stats[1]).item()


def main():
    args = get_parser().parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, val_set = build_data(args.label_noise)
    sampler = DistributedSampler(train_set, shuffle=True, drop_last=True)
    loader = DataLoader(train_set, batch_size=args.batch_size // world, sampler=sampler)
    model = DistributedDataParallel(build_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.SGD, lr=args.lr, momentum=0.9)
    scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        val = validate(model, val_set, rank, world)
        scheduler.step(val)
        if rank == 0:
            print(f"epoch {epoch} train {loss.item():.4f} val {val:.4f} lr {optimizer.param_groups[0]['lr']:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
