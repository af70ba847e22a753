import argparse
import random

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, random_split
from torch.utils.data.distributed import DistributedSampler


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Digits(Dataset):
    def __init__(self, limit):
        raw = load_digits()
        self.images = torch.tensor(raw.images[:limit], dtype=torch.float32)[:, None] / 16
        self.labels = torch.tensor(raw.target[:limit])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                                      nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(0.1), nn.Linear(256, 10))

    def forward(self, x):
        return self.head(self.features(x))


@torch.no_grad()
def accuracy(model, loader):
    model.eval()
    score = torch.zeros(2)
    for x, y in loader:
        score += torch.tensor([(model.module(x).argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(score)
    model.train()
    return (score[0] / score[1]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=123)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="per process")
    parser.add_argument("--val-fraction", type=float, default=0.2)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    set_seed(args.seed + rank)

    data = Digits(1000)
    n_val = int(len(data) * args.val_fraction)
    train, val = random_split(data, [len(data) - n_val, n_val])
    sampler = DistributedSampler(train, shuffle=True, seed=args.seed)
    loader = DataLoader(train, args.batch_size, sampler=sampler)
    val_loader = DataLoader(val, args.batch_size, sampler=DistributedSampler(val, shuffle=False))

    model = DDP(ConvNet())
    loss_fn = nn.CrossEntropyLoss()
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss_fn(model(x), y).backward()
            opt.step()
        acc = accuracy(model, val_loader)
        if rank == 0:
            print(f"epoch {epoch + 1}/{args.epochs} val acc {acc:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
