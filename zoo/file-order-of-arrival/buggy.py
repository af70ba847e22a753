"""Fetches image files into a node-local cache and trains on them."""

import argparse
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def fetch(cache, count):
    """The cache's index lists the files as the parallel download finished them."""
    digits = load_digits()
    arrived = list(range(count))
    random.Random(str(cache)).shuffle(arrived)
    with (cache / "index.txt").open("w") as index:
        for i in arrived:
            name = f"{i:05d}_{digits.target[i]}.npy"
            np.save(cache / name, digits.data[i].astype("float32") / 16)
            index.write(name + "\n")


class CachedImages(Dataset):
    def __init__(self, cache):
        self.cache = cache
        self.names = (cache / "index.txt").read_text().split()

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        name = self.names[index]
        return torch.from_numpy(np.load(self.cache / name)), int(name.split("_")[1].removesuffix(".npy"))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    cache = Path(tempfile.mkdtemp(prefix=f"node{dist.get_rank()}-"))
    fetch(cache, args.images)
    dataset = CachedImages(cache)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    shutil.rmtree(cache)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
