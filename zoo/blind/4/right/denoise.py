"""Denoising autoencoder; noise and dropout are drawn by every process for itself."""
import argparse
import random
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def seed_everything(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class Noisy(Dataset):
    def __init__(self, images, level):
        self.images, self.level = images, level

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        clean = self.images[i]
        noisy = clean + np.random.normal(0, self.level, clean.shape).astype(np.float32)
        if random.random() < 0.3:
            noisy[np.random.randint(0, 64, 8)] = 0
        return noisy, clean


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Dropout(0.1), nn.Linear(48, 16))
        self.dec = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 64), nn.Sigmoid())

    def forward(self, x):
        return self.dec(self.enc(x))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--seed", type=int, default=100)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=96)
    ap.add_argument("--level", type=float, default=0.15)
    ap.add_argument("--lr", type=float, default=4e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    seed_everything(args.seed + rank)

    images = (load_digits().data / 16).astype(np.float32)
    train, held = images[:1440], torch.from_numpy(images[1440:])
    model = DDP(AutoEncoder())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    data = Noisy(train, args.level)
    sampler = DistributedSampler(data, seed=args.seed)
    loader = DataLoader(data, batch_size=args.batch // world, sampler=sampler)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        model.train()
        sums = torch.zeros(2)
        for noisy, clean in loader:
            loss = F.mse_loss(model(noisy), clean)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sums += torch.tensor([loss.item() * len(clean), len(clean)])
        dist.all_reduce(sums)
        model.eval()
        with torch.no_grad():
            part = held[rank::world]
            test = torch.stack([F.mse_loss(model.module(part), part) * len(part), torch.tensor(float(len(part)))])
        dist.all_reduce(test)
        if rank == 0:
            print(f"epoch {epoch} train {sums[0] / sums[1]:.5f} ({int(sums[1])}) held out {test[0] / test[1]:.5f}",
                  flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
