"""Image classification in the style of the ImageNet example, with validation meters."""

import argparse
import time
from enum import Enum

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, Subset, TensorDataset

parser = argparse.ArgumentParser(description="Small ImageNet training")
parser.add_argument("--epochs", default=3, type=int)
parser.add_argument("-b", "--batch-size", default=16, type=int, help="of all processes together")
parser.add_argument("--lr", default=0.05, type=float)
parser.add_argument("--wd", default=1e-4, type=float)
parser.add_argument("-j", "--workers", default=1, type=int)
parser.add_argument("-p", "--print-freq", default=3, type=int)


class Summary(Enum):
    NONE = 0
    AVERAGE = 1


class AverageMeter:
    def __init__(self, name, fmt=":f", summary_type=Summary.AVERAGE):
        self.name, self.fmt, self.summary_type = name, fmt, summary_type
        self.reset()

    def reset(self):
        self.val = self.avg = self.sum = self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float32)
        dist.all_reduce(total, dist.ReduceOp.SUM, async_op=False)
        self.sum, self.count = total.tolist()
        self.avg = self.sum / self.count

    def __str__(self):
        return ("{name} {val" + self.fmt + "} ({avg" + self.fmt + "})").format(**self.__dict__)


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
        return [correct[:k].reshape(-1).float().sum(0) * (100.0 / target.size(0)) for k in topk]


def fake_images(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 5, (n,), generator=g)
    x = torch.randn(n, 3, 8, 8, generator=g) + y.view(-1, 1, 1, 1) * 0.4
    return TensorDataset(x, y)


def train(loader, model, criterion, optimizer, epoch, args):
    losses, top1 = AverageMeter("Loss", ":.4e", Summary.NONE), AverageMeter("Acc@1", ":6.2f", Summary.NONE)
    batch_time = AverageMeter("Time", ":6.3f", Summary.NONE)
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(loader):
        output = model(images)
        loss = criterion(output, target)
        (acc1,) = accuracy(output, target)
        losses.update(loss.item(), images.size(0))
        top1.update(acc1.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
        if i % args.print_freq == 0 and dist.get_rank() == 0:
            print(f"Epoch: [{epoch}][{i}/{len(loader)}]", losses, top1)


def validate(val_loader, model, criterion, args):
    losses, top1, top2 = AverageMeter("Loss", ":.4e"), AverageMeter("Acc@1", ":6.2f"), AverageMeter("Acc@2", ":6.2f")

    def run_validate(loader):
        with torch.no_grad():
            for images, target in loader:
                output = model(images)
                acc1, acc2 = accuracy(output, target, topk=(1, 2))
                losses.update(criterion(output, target).item(), images.size(0))
                top1.update(acc1.item(), images.size(0))
                top2.update(acc2.item(), images.size(0))

    model.eval()
    run_validate(val_loader)
    for meter in (losses, top1, top2):
        meter.all_reduce()
    world = dist.get_world_size()
    if len(val_loader.sampler) * world < len(val_loader.dataset):
        aux = Subset(val_loader.dataset, range(len(val_loader.sampler) * world, len(val_loader.dataset)))
        run_validate(DataLoader(aux, batch_size=args.batch_size, shuffle=False))
    if dist.get_rank() == 0:
        print(" *", top1, top2, losses)
    return top1.avg


def main():
    args = parser.parse_args()
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 5),
    )
    model = nn.parallel.DistributedDataParallel(model)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=args.wd)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
    train_set, val_set = fake_images(96, 0), fake_images(51, 1)
    train_sampler = torch.utils.data.distributed.DistributedSampler(train_set)
    val_sampler = torch.utils.data.distributed.DistributedSampler(val_set, shuffle=False, drop_last=True)
    train_loader = DataLoader(train_set, args.batch_size // world, num_workers=args.workers, sampler=train_sampler)
    val_loader = DataLoader(val_set, args.batch_size // world, num_workers=args.workers, sampler=val_sampler)
    best_acc1 = 0
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        train(train_loader, model, criterion, optimizer, epoch, args)
        acc1 = validate(val_loader, model, criterion, args)
        scheduler.step()
        best_acc1 = max(acc1, best_acc1)
        if dist.get_rank() == 0:
            torch.save(
                {"epoch": epoch + 1, "state_dict": model.state_dict(), "best_acc1": best_acc1}, "checkpoint.pth.tar"
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
