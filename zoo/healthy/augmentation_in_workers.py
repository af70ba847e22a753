"""Random crops and flips in loader workers, seeded from torch's base seed."""

import random

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Digits(Dataset):
    def __init__(self, n):
        digits = load_digits()
        self.images, self.labels = digits.images[:n].astype(np.float32) / 16, digits.target[:n]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        padded = np.pad(self.images[index], 1)
        top, left = np.random.randint(0, 3, 2)
        image = padded[top : top + 8, left : left + 8]
        if random.random() < 0.5:
            image = image[:, ::-1]
        return torch.from_numpy(image.copy())[None], self.labels[index]


def seed_worker(_):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(7 + dist.get_rank())
    dataset = Digits(256)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=2, worker_init_fn=seed_worker)
    model = DDP(nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
