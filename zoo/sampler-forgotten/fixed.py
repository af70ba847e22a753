"""ImageNet-example style training loop with meters, on digits."""

import argparse
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="Digits Training")
parser.add_argument("--epochs", default=3, type=int, metavar="N")
parser.add_argument("-b", "--batch-size", default=64, type=int, help="total over all processes")
parser.add_argument("--lr", default=0.1, type=float)
parser.add_argument("-p", "--print-freq", default=4, type=int)


class AverageMeter:
    def __init__(self, name, fmt=":f"):
        self.name, self.fmt = name, fmt
        self.sum = self.count = self.val = self.avg = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return f"{self.name} {format(self.val, self.fmt[1:])} ({format(self.avg, self.fmt[1:])})"


class ProgressMeter:
    def __init__(self, batches, meters, prefix=""):
        self.batches, self.meters, self.prefix = batches, meters, prefix

    def display(self, batch):
        print("\t".join([f"{self.prefix}[{batch}/{self.batches}]", *map(str, self.meters)]))


def train(loader, model, criterion, optimizer, epoch, args):
    batch_time, losses, top1 = AverageMeter("Time", ":.3f"), AverageMeter("Loss", ":.4f"), AverageMeter("Acc", ":.2f")
    progress = ProgressMeter(len(loader), [batch_time, losses, top1], prefix=f"Epoch: [{epoch}]")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        output = model(images)
        loss = criterion(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update((output.argmax(1) == target).float().mean().item() * 100, images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0 and dist.get_rank() == 0:
            progress.display(i + 1)


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    batch_size = args.batch_size // dist.get_world_size()
    digits = load_digits()
    train_dataset = TensorDataset(torch.tensor(digits.data[:640]).float() / 16, torch.tensor(digits.target[:640]))
    train_sampler = DistributedSampler(train_dataset)
    train_loader = DataLoader(train_dataset, batch_size=batch_size, sampler=train_sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
