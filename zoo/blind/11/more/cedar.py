"""ImageNet style classification, here with the 8x8 digits.

The batch size is given per process and the learning rate follows the linear scaling rule (Goyal et al. 2017), so
a run on more processes takes fewer and larger steps, by design.  BatchNorm statistics are local to a process as in
the paper; the running statistics are averaged before each evaluation (--dist-bn reduce in timm).
"""
import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser(description="training")
parser.add_argument("--epochs", default=3, type=int)
parser.add_argument("-b", "--batch-size", default=32, type=int, help="mini-batch size PER PROCESS")
parser.add_argument("--base-lr", default=0.02, type=float, help="learning rate for a batch of 32")
parser.add_argument("--warmup-epochs", default=1, type=int)


class AverageMeter:
    """Computes and stores the average over all processes"""

    def __init__(self, name, fmt=":f"):
        self.name, self.fmt = name, fmt
        self.sum, self.count = 0.0, 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total, dist.ReduceOp.SUM)
        self.sum, self.count = total.tolist()

    def __str__(self):
        return ("{} {" + self.fmt + "}").format(self.name, self.sum / max(self.count, 1))


def accuracy(output, target, topk=(1,)):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1).expand(max(topk), -1))
        return [correct[:k].reshape(-1).float().sum().item() * 100.0 / target.size(0) for k in topk]


def conv_bn(i, o, s):
    return nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


def distribute_bn(model, world_size):
    for name, buf in model.named_buffers(recurse=True):
        if "running_mean" in name or "running_var" in name:
            dist.all_reduce(buf, op=dist.ReduceOp.SUM)
            buf /= float(world_size)


def adjust_learning_rate(optimizer, epoch, step, steps_per_epoch, args, peak):
    e = epoch + step / steps_per_epoch
    if e < args.warmup_epochs:  # from the base rate up to the scaled one
        lr = args.base_lr + (peak - args.base_lr) * e / args.warmup_epochs
    else:
        lr = peak * 0.1 ** (int(e) // 2)
    for g in optimizer.param_groups:
        g["lr"] = lr


def main():
    args = parser.parse_args()
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "30103")
    dist.init_process_group(backend="gloo")
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(conv_bn(1, 16, 1), conv_bn(16, 32, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(128, 10))
    # buffers stay local during training, see distribute_bn()
    model = nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
    criterion = nn.CrossEntropyLoss()
    peak = args.base_lr * world_size * args.batch_size / 32
    optimizer = torch.optim.SGD(model.parameters(), args.base_lr, momentum=0.9, weight_decay=1e-4, nesterov=True)

    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    y = torch.tensor(y)
    train_set, val_set = TensorDataset(x[:1536], y[:1536]), TensorDataset(x[1536:1792], y[1536:1792])
    train_sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=args.batch_size, sampler=train_sampler)
    val_loader = DataLoader(val_set, batch_size=64, sampler=DistributedSampler(val_set, shuffle=False))

    best_acc1 = 0
    for epoch in range(args.epochs):
        train_sampler.set_epoch(epoch)
        losses = AverageMeter("Loss", ":.4e")
        model.train()
        for i, (images, target) in enumerate(loader):
            adjust_learning_rate(optimizer, epoch, i, len(loader), args, peak)
            output = model(images)
            loss = criterion(output, target)
            losses.update(loss.item(), images.size(0))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        distribute_bn(model, world_size)
        top1, top5 = AverageMeter("Acc@1", ":6.2f"), AverageMeter("Acc@5", ":6.2f")
        model.eval()
        with torch.no_grad():
            for images, target in val_loader:
                a1, a5 = accuracy(model(images), target, (1, 5))
                top1.update(a1, images.size(0))
                top5.update(a5, images.size(0))
        for m in (losses, top1, top5):
            m.all_reduce()
        best_acc1 = max(best_acc1, top1.sum / top1.count)
        if dist.get_rank() == 0:
            print(f"Epoch [{epoch}]", losses, top1, top5, f"best {best_acc1:.2f}")
            torch.save({"epoch": epoch + 1, "state_dict": model.module.state_dict()}, "checkpoint.pth.tar")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
