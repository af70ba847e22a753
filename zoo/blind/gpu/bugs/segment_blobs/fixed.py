"""Semantic segmentation of synthetic blobs with partially labelled images."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

IGNORE = 255
CLASSES = 5


class Blobs(Dataset):
    def __init__(self, n, seed, size=32):
        g = torch.Generator().manual_seed(seed)
        field = F.interpolate(torch.randn(n, CLASSES, 4, 4, generator=g), size=size, mode="bilinear")
        self.y = field.argmax(dim=1)
        colours = torch.randn(CLASSES, 3, generator=torch.Generator().manual_seed(99))
        self.x = colours[self.y].permute(0, 3, 1, 2).contiguous()
        self.x += 0.7 * torch.randn(self.x.shape, generator=g)
        width = (2 + 30 * torch.rand(n, generator=g) ** 2).long()
        columns = torch.arange(size).view(1, 1, size)
        self.y = torch.where(columns < width.view(n, 1, 1), self.y, torch.tensor(IGNORE))

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def conv(cin, cout, stride=1):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False), nn.GroupNorm(8, cout), nn.ReLU()
    )


class SmallUNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc1, self.enc2, self.enc3 = conv(3, 32), conv(32, 64, 2), conv(64, 64)
        self.up = nn.ConvTranspose2d(64, 32, 2, stride=2)
        self.dec = conv(64, 32)
        self.head = nn.Conv2d(32, CLASSES, 1)

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc3(self.enc2(a))
        return self.head(self.dec(torch.cat([a, self.up(b)], dim=1)))


def main():
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(21)

    dataset = Blobs(192, seed=4)
    sampler = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=True, seed=1)
    loader = DataLoader(dataset, batch_size=12 // world, sampler=sampler, pin_memory=True, num_workers=0)
    model = SmallUNet().to(device).to(memory_format=torch.channels_last)
    if world > 1:
        model = DistributedDataParallel(model, device_ids=[device.index], gradient_as_bucket_view=True)
    epochs = 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    steps = epochs * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: (1 - s / steps) ** 0.9)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        running = torch.zeros(2, device=device, dtype=torch.float64)
        for images, labels in loader:
            images = images.to(device, non_blocking=True, memory_format=torch.channels_last)
            labels = labels.to(device, non_blocking=True)
            loss_sum = F.cross_entropy(model(images), labels, ignore_index=IGNORE, reduction="sum")
            labelled = (labels != IGNORE).sum()
            labelled_all = labelled.clone()
            if world > 1:
                dist.all_reduce(labelled_all)
            loss = loss_sum * world / labelled_all
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            schedule.step()
            running += torch.stack([loss_sum.detach(), labelled.float()])
        if world > 1:
            dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch} loss {(running[0] / running[1]).item():.4f} lr {schedule.get_last_lr()[0]:.4f}")

    held_out = Blobs(48, seed=5)
    model.eval()
    hits = torch.zeros(2, dtype=torch.long, device=device)
    with torch.no_grad():
        net = model.module if world > 1 else model
        images = held_out.x[rank::world].to(device, memory_format=torch.channels_last)
        labels = held_out.y[rank::world].to(device)
        prediction = net(images).argmax(dim=1)
        hits[0] = ((prediction == labels) & (labels != IGNORE)).sum()
        hits[1] = (labels != IGNORE).sum()
    if world > 1:
        dist.all_reduce(hits)
    if rank == 0:
        print(f"pixel accuracy {hits[0].item() / hits[1].item():.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
