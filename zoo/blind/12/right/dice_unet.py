"""Segmentation of blobs with a small U-Net: cross entropy + dice over the whole batch, OneCycle, IoU of the data set."""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, BATCH, SIZE = 4, 32, 16


class Blobs(Dataset):
    """Noisy pictures with one to three discs."""

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        rng = np.random.default_rng(self.first + i)
        y, x = np.mgrid[:SIZE, :SIZE]
        mask = np.zeros((SIZE, SIZE), bool)
        for _ in range(rng.integers(1, 4)):
            cy, cx, r = rng.uniform(2, SIZE - 2, 2).tolist() + [rng.uniform(1.2, 3.5)]
            mask |= (y - cy) ** 2 + (x - cx) ** 2 < r * r
        image = mask * rng.uniform(0.5, 1.0) + rng.normal(0, 0.4, mask.shape)
        return torch.tensor(image[None], dtype=torch.float32), torch.tensor(mask[None], dtype=torch.float32)


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(2, o), nn.ReLU())


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2, self.mid = conv(1, 8), conv(8, 12), conv(12, 16)
        self.up2, self.up1 = conv(16 + 12, 12), conv(12 + 8, 8)
        self.out = nn.Conv2d(8, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.mid(F.max_pool2d(b, 2))
        c = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        return self.out(self.up1(torch.cat([F.interpolate(c, scale_factor=2), a], 1)))


def dice_loss(logits, masks):
    p = torch.sigmoid(logits)
    sums = torch.stack([(p * masks).sum(), p.sum(), masks.sum()])
    if dist.is_initialized():
        sums = dist_fn.all_reduce(sums)
    return 1 - (2 * sums[0] + 1) / (sums[1] + sums[2] + 1)


@torch.no_grad()
def intersection_over_union(net, loader):
    counts = torch.zeros(2, dtype=torch.long)
    for image, mask in loader:
        guess, mask = net(image) > 0, mask > 0.5
        counts += torch.stack([(guess & mask).sum(), (guess | mask).sum()])
    if dist.is_initialized():
        dist.all_reduce(counts)
    return counts[0].item() / counts[1].item()


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(42)
    train_set, val_set = Blobs(0, 256), Blobs(10_000, 70)
    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, seed=3)
    loader = DataLoader(train_set, BATCH // world, sampler=sampler)
    val_loader = DataLoader(Subset(val_set, range(len(val_set))[rank::world]), 32)
    net = UNet()
    model = DDP(net, gradient_as_bucket_view=True) if world > 1 else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, eps=1e-5)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=8e-3, total_steps=EPOCHS * len(loader))
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for image, mask in loader:
            logits = model(image)
            dice = dice_loss(logits, mask)
            loss = F.binary_cross_entropy_with_logits(logits, mask) + dice
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        iou = intersection_over_union(net, val_loader)
        if rank == 0:
            print(f"epoch {epoch} dice {1 - dice.item():.5f} iou {iou:.5f}", flush=True)
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
