import os
import tempfile
from enum import Enum

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

RANK, WORLD = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
DISTRIBUTED = WORLD > 1


class Block(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn1, self.bn2 = nn.GroupNorm(4, cout), nn.GroupNorm(4, cout)
        self.skip = nn.Conv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x):
        out = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(out)) + self.skip(x))


class Summary(Enum):
    AVERAGE = "avg"
    COUNT = "count"


class AverageMeter:
    def __init__(self, name, summary_type=Summary.AVERAGE):
        self.name, self.summary_type = name, summary_type
        self.sum = self.count = self.avg = 0.0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def all_reduce(self):
        total = torch.tensor([self.sum, self.count], dtype=torch.float64)
        dist.all_reduce(total, dist.ReduceOp.SUM)
        self.sum, self.count = total.tolist()
        self.avg = self.sum / self.count

    def summary(self):
        if self.summary_type is Summary.COUNT:
            return f"{self.name} {int(self.count)}"
        return f"{self.name} {self.avg:.4f}"


def accuracy(output, target, topk=(1,)):
    correct = output.topk(max(topk), 1).indices.t().eq(target.view(1, -1))
    return [correct[:k].reshape(-1).float().sum().item() * 100.0 / target.size(0) for k in topk]


def train(loader, model, criterion, optimizer):
    model.train()
    losses = AverageMeter("Loss")
    for images, target in loader:
        loss = criterion(model(images), target)
        losses.update(loss.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if DISTRIBUTED:
        losses.all_reduce()
    return losses.avg


def validate(loader, model, criterion, batch_size):
    meters = [AverageMeter("Loss"), AverageMeter("Acc@1"), AverageMeter("Acc@3"), AverageMeter("n", Summary.COUNT)]

    def run_validate(loader):
        with torch.no_grad():
            for images, target in loader:
                output = model(images)
                acc1, acc3 = accuracy(output, target, topk=(1, 3))
                for m, v in zip(meters, (criterion(output, target).item(), acc1, acc3, 1.0)):
                    m.update(v, images.size(0))

    model.eval()
    run_validate(loader)
    if DISTRIBUTED:
        for m in meters:
            m.all_reduce()
        seen = len(loader.sampler) * WORLD
        if seen < len(loader.dataset):
            rest = Subset(loader.dataset, range(seen, len(loader.dataset)))
            run_validate(DataLoader(rest, batch_size=batch_size))
    return meters


def build():
    torch.manual_seed(4)
    model = nn.Sequential(Block(1, 8, 1), Block(8, 16, 2), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10))
    if DISTRIBUTED:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)


def main_worker(start, stop, path, train_set, val_set, batch_size):
    model, optimizer, scheduler = build()
    criterion = nn.CrossEntropyLoss()
    bare = model.module if DISTRIBUTED else model
    best_acc1 = 0.0
    if os.path.isfile(path):
        checkpoint = torch.load(path)
        best_acc1 = checkpoint["best_acc1"]
        bare.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    sampler = DistributedSampler(train_set, num_replicas=WORLD, rank=RANK)
    train_loader = DataLoader(train_set, batch_size, sampler=sampler)
    val_loader = DataLoader(val_set, batch_size, sampler=DistributedSampler(
        val_set, num_replicas=WORLD, rank=RANK, shuffle=False, drop_last=True))
    for epoch in range(start, stop):
        sampler.set_epoch(epoch)
        train_loss = train(train_loader, model, criterion, optimizer)
        meters = validate(val_loader, model, criterion, batch_size)
        scheduler.step()
        best_acc1 = max(meters[1].avg, best_acc1)
        if RANK == 0:
            print(f"Epoch {epoch} train {train_loss:.5f} | " + " ".join(m.summary() for m in meters), f"best {best_acc1:.3f}")
            torch.save({"state_dict": bare.state_dict(), "best_acc1": best_acc1, "optimizer": optimizer.state_dict(),
                        "scheduler": scheduler.state_dict()}, path)
        if DISTRIBUTED:
            dist.barrier()


if __name__ == "__main__":
    if DISTRIBUTED:
        dist.init_process_group("gloo")
    digits = load_digits()
    x, y = torch.tensor(digits.images / 16.0, dtype=torch.float32).unsqueeze(1), torch.tensor(digits.target)
    data = TensorDataset(x[:1024], y[:1024]), TensorDataset(x[1024:1387], y[1024:1387])
    box = [tempfile.mkdtemp() if RANK == 0 else None]
    if DISTRIBUTED:
        dist.broadcast_object_list(box, src=0)
    ckpt = os.path.join(box[0], "checkpoint.pth.tar")
    main_worker(0, 2, ckpt, *data, 64 // WORLD)
    main_worker(2, 4, ckpt, *data, 64 // WORLD)
    if DISTRIBUTED:
        dist.destroy_process_group()
