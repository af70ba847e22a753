"""Semantic segmentation of synthetic 6x6 images, scored by mean IoU."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

CLASSES = 4


class Shapes(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.mask = torch.zeros(n, 6, 6, dtype=torch.long)
        for i in range(n):
            r, c = torch.randint(0, 4, (2,), generator=g).tolist()
            kind = int(torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), 1, generator=g)) + 1
            self.mask[i, r : r + 3, c : c + 2 + kind % 2] = kind
        self.image = F.one_hot(self.mask, CLASSES)[..., :3].permute(0, 3, 1, 2).float()
        self.image = self.image + 0.5 * torch.randn(self.image.shape, generator=g)

    def __len__(self):
        return len(self.mask)

    def __getitem__(self, i):
        return self.image[i], self.mask[i]


def confusion(pred, target):
    return torch.bincount((target * CLASSES + pred).flatten(), minlength=CLASSES**2).view(CLASSES, CLASSES).double()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    matrix = torch.zeros(CLASSES, CLASSES, dtype=torch.float64)
    for image, mask in loader:
        matrix += confusion(model(image).argmax(1), mask)
    dist.all_reduce(matrix)
    iou = matrix.diag() / (matrix.sum(0) + matrix.sum(1) - matrix.diag()).clamp(min=1)
    miou = iou.mean()
    return miou.item()


def main():
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    torch.manual_seed(0)
    train, val = Shapes(64, 0), Shapes(32, 1)
    sampler = DistributedSampler(train)
    train_loader = DataLoader(train, 16 // world, sampler=sampler)
    val_loader = DataLoader(val, 8, sampler=DistributedSampler(val, shuffle=False))
    model = DDP(nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, CLASSES, 3, padding=1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for epoch in range(4):
        model.train()
        sampler.set_epoch(epoch)
        for image, mask in train_loader:
            loss = F.cross_entropy(model(image), mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        miou = evaluate(model, val_loader)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} mIoU {miou:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
