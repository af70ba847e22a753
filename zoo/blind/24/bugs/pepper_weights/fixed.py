"""Imbalanced digit classifier with class weights, DDP."""
import argparse
import logging
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

log = logging.getLogger("pepper")


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=4)
    ap.add_argument("--batch", type=int, default=64, help="over all processes")
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--seed", type=int, default=3)
    return ap.parse_args()


def imbalanced(seed, batch):
    digits = load_digits()
    rng = np.random.default_rng(seed)
    keep = []
    for c in range(10):
        rows = np.flatnonzero(digits.target == c)
        keep.append(rng.permutation(rows)[: 160 if c < 3 else 30])
    keep = rng.permutation(np.concatenate(keep))
    keep = keep[: len(keep) // batch * batch]
    x = torch.tensor(digits.data[keep] / 16.0, dtype=torch.float32)
    y = torch.tensor(digits.target[keep])
    return TensorDataset(x, y)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU())
        self.head = nn.Linear(48, 10)

    def forward(self, x):
        return self.head(self.body(x))


def main():
    args = parse()
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")

    torch.manual_seed(args.seed)
    data = imbalanced(args.seed, args.batch)
    labels = data.tensors[1]
    counts = torch.bincount(labels, minlength=10).float()
    class_weight = len(labels) / (10 * counts)

    sampler = DistributedSampler(data, num_replicas=world, rank=rank, shuffle=True, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch // world, sampler=sampler)
    model = DDP(Net())
    criterion = nn.CrossEntropyLoss(weight=class_weight, reduction="sum")
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            total = class_weight[y].sum()
            dist.all_reduce(total)
            loss = criterion(model(x), y) * world / total
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            pred = model.module(data.tensors[0]).argmax(1)
            recall = torch.stack([(pred[labels == c] == c).float().mean() for c in range(10)])
        log.info("epoch %d  balanced accuracy %.4f", epoch, recall.mean().item())

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
