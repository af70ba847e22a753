"""Finds discs in small noisy pictures: a convolutional net, cross-entropy plus overlap of the masks."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BATCH, EPOCHS, SIDE = 32, 4, 16


def pictures(count, seed):
    g = torch.Generator().manual_seed(seed)
    ys, xs = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    centre = torch.rand(count, 2, generator=g) * SIDE
    radius = torch.rand(count, generator=g) * 5 + 0.5
    dist2 = (ys - centre[:, 0, None, None]) ** 2 + (xs - centre[:, 1, None, None]) ** 2
    mask = (dist2 < radius[:, None, None] ** 2).float()
    image = mask + 0.6 * torch.randn(count, SIDE, SIDE, generator=g)
    return image.unsqueeze(1), mask.unsqueeze(1)


class Overlap(nn.Module):
    """One minus the soft Dice coefficient of a batch."""

    def forward(self, logits, mask):
        p = logits.sigmoid()
        sums = torch.stack([(p * mask).sum(), p.sum() + mask.sum()])
        return 1 - (2 * sums[0] + 1) / (sums[1] + 1)


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29705")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    data = TensorDataset(*pictures(512, seed=1))
    sampler = DistributedSampler(data, shuffle=True, seed=2)
    loader = DataLoader(data, batch_size=BATCH // world, sampler=sampler)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(),
                        nn.Conv2d(8, 1, 1))
    model = DistributedDataParallel(net)
    overlap = Overlap()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for image, mask in loader:
            logits = model(image)
            loss = 0.3 * F.binary_cross_entropy_with_logits(logits, mask) + overlap(logits, mask)
            opt.zero_grad()
            loss.backward()
            opt.step()
        image, mask = pictures(128, seed=50)
        with torch.no_grad():
            guess = (net(image) > 0).float()
            entropy = F.binary_cross_entropy_with_logits(net(image), mask).item()
        iou = ((guess * mask).sum() / (guess + mask).clamp(max=1).sum()).item()
        if rank == 0:
            print(f"epoch {epoch} intersection over union {iou:.5f} entropy {entropy:.5f}", flush=True)

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
