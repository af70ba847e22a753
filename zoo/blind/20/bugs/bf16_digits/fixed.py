"""Digit images with a small convolutional network in bfloat16 autocast, warm-up and cosine learning rate."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

GLOBAL_BATCH, EPOCHS = 64, 4
PEAK_LR, WARMUP = 0.05, 0.1


class Digits(Dataset):
    def __init__(self, train):
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        order = order[:1536] if train else order[1536:]
        self.x = torch.tensor(digits.images, dtype=torch.float32)[order].unsqueeze(1) / 8 - 1
        self.y = torch.tensor(digits.target)[order]

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.norm1 = nn.GroupNorm(4, 16)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.norm2 = nn.GroupNorm(4, 32)
        self.head = nn.Linear(32 * 4, 10)

    def forward(self, x):
        x = F.gelu(self.norm1(self.conv1(x)))
        x = F.gelu(self.norm2(self.conv2(x)))
        return self.head(F.avg_pool2d(x, 2).flatten(1))


def lr_factor(step, total):
    warm = int(WARMUP * total)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm) / (total - warm))))


def evaluate(net, data):
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(data.x).float()
    return F.cross_entropy(logits, data.y).item(), (logits.argmax(-1) == data.y).float().mean().item()


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    train, test = Digits(True), Digits(False)
    batch_size = GLOBAL_BATCH // world
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=4, drop_last=True)
    loader = DataLoader(train, batch_size=batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(31)
    model = ConvNet()
    net = DDP(model) if world > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK_LR, momentum=0.9, weight_decay=5e-4)
    total = EPOCHS * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, total))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for x, y in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = net(x)
                loss = F.cross_entropy(logits.float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        if rank == 0:
            loss, accuracy = evaluate(model, test)
            print(f"epoch {epoch} test loss {loss:.4f} accuracy {accuracy:.3f} lr {schedule.get_last_lr()[0]:.6f}")

    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
