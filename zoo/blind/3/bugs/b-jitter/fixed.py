import argparse
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

torch.set_num_threads(1)


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--seed", type=int, default=123)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--batch-size", type=int, default=24, help="per process")
    p.add_argument("--lr", type=float, default=0.15)
    p.add_argument("--noise", type=float, default=0.25)
    p.add_argument("--drop", type=float, default=0.1)
    return p.parse_args()


class JitteredDigits(Dataset):
    """Random shift, brightness, pixel noise and a cut-out square."""

    def __init__(self, images, labels, noise, rng=None):
        self.images = images.astype(np.float32) / 16.0
        self.labels = labels
        self.noise = noise
        self.rng = rng

    def __len__(self):
        return len(self.images)

    def augment(self, img):
        dy, dx = self.rng.integers(-1, 2, size=2)
        img = np.roll(img, (dy, dx), axis=(0, 1))
        img = img * self.rng.uniform(0.7, 1.3) + self.noise * self.rng.standard_normal(img.shape)
        r, c = self.rng.integers(0, 6, size=2)
        img[r:r + 3, c:c + 3] = 0.0
        return img.astype(np.float32)

    def __getitem__(self, i):
        img = self.images[i]
        if self.rng is not None:
            img = self.augment(img)
        return torch.from_numpy(img).flatten(), int(self.labels[i])


def build_model(drop):
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Dropout(drop), nn.Linear(96, 64), nn.ReLU(),
                         nn.Dropout(drop), nn.Linear(64, 10))


def main():
    args = parse()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    digits = load_digits()
    rng = np.random.default_rng([args.seed, rank])
    train = JitteredDigits(digits.images[:1200], digits.target[:1200], args.noise, rng)
    test = JitteredDigits(digits.images[1200:], digits.target[1200:], args.noise)

    torch.manual_seed(args.seed)
    model = DDP(build_model(args.drop))
    torch.manual_seed(args.seed + 1 + rank)

    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch_size, sampler=sampler, num_workers=0)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        meter = torch.zeros(2)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            meter += torch.tensor([loss.item() * len(yb), len(yb)])
        dist.all_reduce(meter)
        if rank == 0:
            print(f"epoch {epoch} train loss {(meter[0] / meter[1]).item():.4f}", flush=True)

    model.eval()
    hits = torch.zeros(1)
    with torch.no_grad():
        for i in range(rank, len(test), world):
            x, y = test[i]
            hits += float(model.module(x[None]).argmax().item() == y)
    dist.all_reduce(hits)
    if rank == 0:
        print(f"test accuracy {hits.item() / len(test):.4f}")
        torch.save(model.module.state_dict(), "jitter.pt")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
