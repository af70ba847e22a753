"""Sentiment from bags of hashed words."""

import random
from zlib import crc32

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

GOOD = ["great", "lovely", "superb", "warm", "clever", "bright"]
BAD = ["awful", "boring", "cold", "dull", "cheap", "noisy"]
OTHER = ["film", "actor", "plot", "music", "the", "and", "of", "scene"]


def bucket(word, size):
    return crc32(word.encode()) % size


class Reviews(Dataset):
    def __init__(self, n=96, size=32):
        rng = random.Random(12)
        self.size = size
        self.rows = []
        for _ in range(n):
            label = rng.randrange(2)
            words = rng.choices(OTHER, k=5) + rng.choices(GOOD if label else BAD, k=2) + rng.choices(GOOD + BAD, k=1)
            self.rows.append((words, label))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        words, label = self.rows[i]
        x = torch.zeros(self.size)
        for word in words:
            x[bucket(word, self.size)] += 1
        return x, torch.tensor(float(label))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    data = Reviews()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 16 // dist.get_world_size(), sampler=sampler)
    model = DDP(nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(-1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
