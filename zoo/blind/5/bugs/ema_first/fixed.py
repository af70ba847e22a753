"""Small convolutional net on digits. The averaged weights are evaluated, and the best epoch of them is reported."""
import argparse
import copy
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Digits(Dataset):
    def __init__(self, part):
        images, labels = load_digits(return_X_y=True)
        order = np.random.RandomState(0).permutation(len(images))
        order = order[:1440] if part == "train" else order[1440:1796]
        self.images = torch.tensor(images[order], dtype=torch.float32).view(-1, 1, 8, 8) / 16
        self.labels = torch.tensor(labels[order])

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.images[i], self.labels[i]


class WeightAverage:
    def __init__(self, net, decay):
        self.net = copy.deepcopy(net).requires_grad_(False).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, net):
        for slow, fast in zip(self.net.parameters(), net.parameters()):
            slow.lerp_(fast, 1 - self.decay)


def make_net():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.GroupNorm(3, 24), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(96, 10))


@torch.no_grad()
def evaluate(net, loader):
    totals = torch.zeros(3, dtype=torch.float64)
    for images, labels in loader:
        logits = net(images)
        totals += torch.stack([F.cross_entropy(logits, labels, reduction="sum").double(),
                               (logits.argmax(1) == labels).sum().double(), torch.tensor(float(len(labels)))])
    dist.all_reduce(totals)
    return (totals[0] / totals[2]).item(), (totals[1] / totals[2]).item()


def main(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed + rank)
    np.random.seed(args.seed + rank)

    train_set, test_set = Digits("train"), Digits("test")
    sampler = DistributedSampler(train_set, seed=args.seed, drop_last=True)
    train = DataLoader(train_set, args.batch // world, sampler=sampler, drop_last=True)
    test = DataLoader(test_set, 89, sampler=DistributedSampler(test_set, shuffle=False))

    net = make_net()
    model = DistributedDataParallel(net)
    average = WeightAverage(net, args.decay)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)

    best = (float("inf"), -1)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for images, labels in train:
            opt.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            opt.step()
            average.update(net)
        loss, accuracy = evaluate(average.net, test)
        best = min(best, (loss, epoch))
        if rank == 0:
            print(f"epoch {epoch}  averaged weights: loss {loss:.4f}  accuracy {accuracy:.4f}")
    if rank == 0:
        print(f"best epoch {best[1]} with loss {best[0]:.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=120)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--decay", type=float, default=0.97)
    parser.add_argument("--seed", type=int, default=42)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(parser.parse_args())
    time.sleep(0.3)
    dist.destroy_process_group()
