"""ImageNet-example style training with an exact evaluation over unpadded parts."""

import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler


class AverageMeter:
    def __init__(self, name):
        self.name = name
        self.sum = self.count = 0.0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total)
        self.sum, self.count = total.tolist()

    def __str__(self):
        return f"{self.name} {self.sum / max(self.count, 1):.4f}"


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, predicted = output.topk(max(topk), 1)
        correct = predicted.eq(target.view(-1, 1))
        return [correct[:, :k].any(1).float().mean().item() * 100 for k in topk]


def train(loader, model, criterion, optimizer):
    model.train()
    for images, target in loader:
        loss = criterion(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(loader, model, criterion):
    losses, top1, top3 = AverageMeter("Loss"), AverageMeter("Acc@1"), AverageMeter("Acc@3")
    model.eval()
    with torch.no_grad():
        for images, target in loader:
            output = model.module(images)
            acc1, acc3 = accuracy(output, target, topk=(1, 3))
            losses.update(criterion(output, target).item(), len(images))
            top1.update(acc1, len(images))
            top3.update(acc3, len(images))
    for meter in (losses, top1, top3):
        meter.all_reduce()
    return losses, top1, top3


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train_set, val_set = TensorDataset(x[:640], y[:640]), TensorDataset(x[640:971], y[640:971])
    batch_size = args.batch_size // dist.get_world_size()
    train_sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=batch_size, sampler=train_sampler)
    mine = Subset(val_set, range(dist.get_rank(), len(val_set), dist.get_world_size()))
    val_loader = DataLoader(mine, batch_size=batch_size)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.1)
    for epoch in range(args.epochs):
        started = time.time()
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer)
        meters = validate(val_loader, model, criterion)
        scheduler.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}", *meters, f"{time.time() - started:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
