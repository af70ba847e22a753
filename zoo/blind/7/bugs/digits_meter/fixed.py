import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.data.distributed import DistributedSampler


class Digits(Dataset):
    def __init__(self, lo, hi):
        d = load_digits()
        self.img = torch.tensor(d.images[lo:hi], dtype=torch.float32) / 16
        self.lab = d.target[lo:hi].tolist()

    def __len__(self):
        return len(self.lab)

    def __getitem__(self, i):
        return self.img[i].unsqueeze(0), self.lab[i]


class Meter:
    """Running confusion counts; value() may be asked at any time."""

    def __init__(self, classes):
        self.counts = torch.zeros(classes, classes, dtype=torch.long)

    def update(self, pred, lab):
        self.counts += torch.bincount(lab * len(self.counts) + pred, minlength=self.counts.numel()).view_as(self.counts)

    def value(self):
        c = self.counts.clone()
        if dist.get_world_size() > 1:
            dist.all_reduce(c)
        c = c.double()
        recall = c.diag() / c.sum(1).clamp(min=1)
        precision = c.diag() / c.sum(0).clamp(min=1)
        f1 = 2 * recall * precision / (recall + precision).clamp(min=1e-9)
        return f1.mean().item(), int(c.sum())


def evaluate(model, loader, meter):
    model.eval()
    curve = []
    with torch.no_grad():
        for i, (img, lab) in enumerate(loader):
            meter.update(model(img).argmax(1), lab)
            if i % 3 == 2:
                curve.append(meter.value()[0])
    model.train()
    return curve, meter.value()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, valid = Digits(0, 1280), Digits(1280, 1760)
    tr_sampler = DistributedSampler(train, seed=4)
    tr = DataLoader(train, 80 // world, sampler=tr_sampler)
    va = DataLoader(Subset(valid, range(rank, len(valid), world)), 48 // world)

    torch.manual_seed(6)
    net = nn.Sequential(
        nn.Conv2d(1, 12, 3), nn.LeakyReLU(0.1), nn.Conv2d(12, 24, 3, stride=2), nn.LeakyReLU(0.1),
        nn.Flatten(), nn.Linear(96, 10),
    )
    model = DDP(net)
    opt = torch.optim.Adamax(net.parameters(), lr=4e-3)
    for epoch in range(2):
        tr_sampler.set_epoch(epoch)
        for img, lab in tr:
            opt.zero_grad()
            nn.functional.cross_entropy(model(img), lab).backward()
            opt.step()
        curve, (f1, n) = evaluate(model, va, Meter(10))
        if rank == 0:
            print(f"epoch {epoch} macro F1 {f1:.5f} on {n} images; so far", " ".join(f"{v:.4f}" for v in curve))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29601").items():
        os.environ.setdefault(k, v)
    main()
