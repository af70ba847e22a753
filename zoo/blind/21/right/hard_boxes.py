"""Box detector head on synthetic maps; only the hardest negatives of the batch count."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Sampler

SIDE, BATCH, RATIO = 8, 16, 3


class Scenes(Dataset):
    """Images of 16x16 with zero to five blobs; targets on an 8x8 grid."""

    def __init__(self, n=200):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(3000 + i)
        image = 0.4 * torch.randn(1, 16, 16, generator=g)
        cls, size = torch.zeros(SIDE, SIDE), torch.zeros(SIDE, SIDE)
        for _ in range(int(torch.randint(0, 6, (1,), generator=g))):
            r, c = torch.randint(0, SIDE, (2,), generator=g).tolist()
            s = 0.5 + torch.rand((), generator=g)
            image[0, 2 * r:2 * r + 2, 2 * c:2 * c + 2] += 2 * s
            cls[r, c], size[r, c] = 1.0, s
        return image, cls, size


class Curriculum(Sampler):
    """First the first half of the scenes, later all of them; every rank gets its block of each batch."""

    def __init__(self, n, rank, world):
        self.n, self.rank, self.world, self.epoch = n, rank, world, 0

    def __iter__(self):
        size = self.n // 2 if self.epoch == 0 else self.n
        order = torch.randperm(size, generator=torch.Generator().manual_seed(self.epoch))
        for batch in order.split(BATCH):
            yield batch.tensor_split(self.world)[self.rank].tolist()


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.SiLU(), nn.Conv2d(16, 16, 2, stride=2), nn.SiLU())
        self.cls, self.size = nn.Conv2d(16, 1, 1), nn.Conv2d(16, 1, 1)

    def forward(self, x):
        h = self.body(x)
        return self.cls(h)[:, 0], self.size(h)[:, 0]


def gather_uneven(t, world):
    if world == 1:
        return t
    n = torch.tensor([t.numel()])
    sizes = [torch.empty_like(n) for _ in range(world)]
    dist.all_gather(sizes, n)
    longest = max(int(s) for s in sizes)
    padded = F.pad(t, (0, longest - t.numel()), value=-1.0)
    parts = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(parts, padded)
    return torch.cat([p[:int(s)] for p, s in zip(parts, sizes)])


def main():
    rank, world = 0, 1
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    data = Scenes()
    sampler = Curriculum(len(data), rank, world)
    loader = DataLoader(data, batch_sampler=sampler)
    torch.manual_seed(12)
    model = Head()
    if dist.is_initialized():
        model = DDP(model)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, eps=1e-6)

    for epoch in range(3):
        sampler.epoch = epoch
        shown = torch.zeros(3)
        for image, cls, size in loader:
            score, extent = model(image)
            point = F.binary_cross_entropy_with_logits(score, cls, reduction="none")
            positive = cls > 0
            found = positive.sum()
            if world > 1:
                dist.all_reduce(found)
            pool = gather_uneven(point.detach()[~positive], world)
            keep = max(int(found) * RATIO, 8)
            limit = pool.topk(keep).values[-1]
            hard = ~positive & (point.detach() >= limit)
            box = F.smooth_l1_loss(extent[positive], size[positive], reduction="sum")
            local = (point[positive].sum() + point[hard].sum()) / (int(found) + keep) + box / max(int(found), 1)
            opt.zero_grad()
            (local * world).backward()
            opt.step()
            shown += torch.stack([local.detach(), hard.sum().to(local.dtype), positive.sum().to(local.dtype)])
        if world > 1:
            dist.all_reduce(shown)
        if rank == 0:
            print(f"epoch {epoch} loss {shown[0]:.5f} negatives {int(shown[1])} positives {int(shown[2])}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
