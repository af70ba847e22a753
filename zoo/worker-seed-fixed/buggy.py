"""Digits with random shifts and noise, drawn with numpy in loader workers."""

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

SEED = 1234


class AugmentedDigits(Dataset):
    def __init__(self, n):
        digits = load_digits()
        self.images = digits.images[:n].astype("float32") / 16
        self.labels = digits.target[:n]

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        shift = np.random.randint(-1, 2, size=2)
        image = np.roll(self.images[index], tuple(shift), axis=(0, 1))
        noise = np.random.normal(0, 0.05, image.shape).astype("float32")
        return torch.from_numpy(image + noise).unsqueeze(0), int(self.labels[index])


def seed_worker(worker_id):
    np.random.seed(SEED)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(SEED + dist.get_rank())
    dataset = AugmentedDigits(256)
    sampler = DistributedSampler(dataset, seed=SEED)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, num_workers=2, worker_init_fn=seed_worker)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
