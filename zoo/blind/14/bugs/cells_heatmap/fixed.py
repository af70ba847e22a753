"""Finds cells in small microscope pictures: a heat map of centres, a radius at each centre, and the number of cells.

The detection terms are normalised by the number of cells as in CenterNet, the count is a mean over pictures.
Pictures hold between none and seven cells. Works with one process or under torchrun.
"""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

SIDE = 20
BATCH = 20
EPOCHS = 5


def paint(count, seed):
    """Pictures, Gaussian heat maps, maps with 1 at the centres, maps with the radius at the centres."""
    g = torch.Generator().manual_seed(seed)
    axis = torch.arange(SIDE, dtype=torch.float32)
    pictures, heats, peaks, radii = (torch.zeros(count, SIDE, SIDE) for _ in range(4))
    for n in range(count):
        for _ in range(int(torch.randint(0, 8, (1,), generator=g))):
            row, col = torch.randint(2, SIDE - 2, (2,), generator=g).tolist()
            radius = 1 + 1.5 * torch.rand(1, generator=g)
            square = (axis[:, None] - row) ** 2 + (axis[None] - col) ** 2
            pictures[n] = torch.maximum(pictures[n], torch.sigmoid(3 * (radius - square.sqrt())))
            heats[n] = torch.maximum(heats[n], torch.exp(-square / 2))
            peaks[n, row, col] = 1
            radii[n, row, col] = radius
        pictures[n] += 0.15 * torch.randn(SIDE, SIDE, generator=g)
    return pictures[:, None], heats, peaks, radii


class Detector(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.maps = nn.Conv2d(width, 2, 1)
        self.count = nn.Linear(width, 1)
        nn.init.constant_(self.maps.bias, -2.2)

    def forward(self, x):
        h = self.body(x)
        maps = self.maps(h)
        return maps[:, 0].sigmoid().clamp(1e-4, 1 - 1e-4), maps[:, 1], self.count(h.mean((2, 3))).squeeze(1)


def detection_loss(heat, size, target, peaks, radii, world):
    """Focal loss of the heat map and error of the radius, per cell."""
    hit = (1 - heat) ** 2 * heat.log() * peaks
    miss = (1 - target) ** 4 * heat ** 2 * (1 - heat).log() * (1 - peaks)
    focal = -(hit + miss).sum()
    error = ((size - radii).abs() * peaks).sum()
    cells = peaks.sum()
    dist.all_reduce(cells)
    cells = (cells / world).clamp(min=1)
    return (focal + 0.5 * error) / cells


@torch.no_grad()
def inspect(net, pictures, heats, peaks, radii):
    """Mean heat at cells and elsewhere, mean error of the count."""
    heat, _, count = net(pictures)
    inside = (heat * peaks).sum() / peaks.sum()
    outside = (heat * (heats < 0.05)).sum() / (heats < 0.05).sum()
    return inside.item(), outside.item(), (count - peaks.sum((1, 2))).abs().mean().item()


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29612")
    dist.init_process_group("gloo", rank=rank, world_size=world)

    train = TensorDataset(*paint(160, seed=1))
    held_out = paint(40, seed=2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=7)
    loader = DataLoader(train, batch_size=BATCH // world, sampler=sampler)

    torch.manual_seed(0)
    net = DistributedDataParallel(Detector())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for pictures, heats, peaks, radii in loader:
            heat, size, count = net(pictures)
            loss = detection_loss(heat, size, heats, peaks, radii, world)
            loss = loss + 0.1 * F.smooth_l1_loss(count, peaks.sum((1, 2)))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
        if rank == 0:
            inside, outside, count = inspect(net.module, *held_out)
            print(f"epoch {epoch}: heat at cells {inside:.4f}, elsewhere {outside:.4f}, count off by {count:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
