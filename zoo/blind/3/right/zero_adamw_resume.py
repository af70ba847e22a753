import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def build(args, steps_per_epoch):
    torch.manual_seed(args.seed)
    net = nn.Sequential(
        nn.Linear(64, 128), nn.LayerNorm(128), nn.GELU(),
        nn.Linear(128, 96), nn.LayerNorm(96), nn.GELU(),
        nn.Linear(96, 10),
    )
    model = DDP(net)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=torch.optim.AdamW,
                                        lr=args.lr / 25, weight_decay=0.02)
    scheduler = OneCycleLR(optimizer, max_lr=args.lr, total_steps=args.epochs * steps_per_epoch,
                           cycle_momentum=False)
    return model, optimizer, scheduler


def save(path, model, optimizer, scheduler, epoch, rank):
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(), "epoch": epoch}, path)
    dist.barrier()


def load(path, model, optimizer, scheduler):
    ck = torch.load(path, map_location="cpu", weights_only=False)
    model.module.load_state_dict(ck["model"])
    optimizer.load_state_dict(ck["optimizer"])
    scheduler.load_state_dict(ck["scheduler"])
    return ck["epoch"] + 1


def train_epoch(model, loader, optimizer, scheduler):
    loss_fn = nn.CrossEntropyLoss(label_smoothing=0.05)
    total = 0.0
    for x, y in loader:
        optimizer.zero_grad()
        loss = loss_fn(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        total += loss.item()
    return total / len(loader)


def test(model, x, y, rank, world):
    with torch.no_grad():
        hits = (model.module(x[rank::world]).argmax(1) == y[rank::world]).sum()
    dist.all_reduce(hits)
    return hits.item() / len(y)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=35, help="per process")
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=21)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32) / 16.0
    y = torch.tensor(y)
    train = TensorDataset(x[:1400], y[:1400])
    sampler = DistributedSampler(train, shuffle=True, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler)

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    ckpt = os.path.join(folder[0], "last.pt")

    start = 0
    model, optimizer, scheduler = build(args, len(loader))
    for phase_end in (1, args.epochs):
        if os.path.exists(ckpt):
            model, optimizer, scheduler = build(args, len(loader))
            start = load(ckpt, model, optimizer, scheduler)
            if rank == 0:
                print(f"resumed at epoch {start}, lr {scheduler.get_last_lr()[0]:.6f}")
        for epoch in range(start, phase_end):
            sampler.set_epoch(epoch)
            avg = torch.tensor(train_epoch(model, loader, optimizer, scheduler))
            dist.all_reduce(avg)
            acc = test(model, x[1400:], y[1400:], rank, world)
            if rank == 0:
                print(f"epoch {epoch} loss {avg.item() / world:.5f} acc {acc:.4f}")
            save(ckpt, model, optimizer, scheduler, epoch, rank)

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
