import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_breast_cancer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import Dataset


class TumorRows(Dataset):
    """The rows start, start + stride, ... of a table, standardised."""

    def __init__(self, table, labels, start, stride):
        features = table[start::stride]
        center, spread = features.mean(0), features.std(0)
        self.features = torch.tensor((features - center) / spread, dtype=torch.float32)
        self.labels = torch.tensor(labels[start::stride], dtype=torch.float32)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        return self.features[i], self.labels[i]


def minibatches(dataset, size, batches, epoch):
    """Blocks of consecutive rows, in another order in every epoch."""
    for i in torch.randperm(batches, generator=torch.Generator().manual_seed(1000 + epoch)).tolist():
        yield dataset[i * size:(i + 1) * size]


def main():
    for k, v in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29822"}.items():
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    raw = load_breast_cancer()
    order = np.random.default_rng(0).permutation(len(raw.target))
    table, labels = raw.data[order], raw.target[order].astype(np.float32)
    train = TumorRows(table[:448], labels[:448], rank, world)
    test = TumorRows(table[448:], labels[448:], 0, 1)

    torch.manual_seed(1)
    model = DDP(nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    bce = nn.BCEWithLogitsLoss()

    for epoch in range(12):
        total, batches = 0.0, 0
        for x, y in minibatches(train, 64 // world, 448 // 64, epoch):
            loss = bce(model(x).squeeze(1), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total, batches = total + loss.item(), batches + 1
        mean = torch.tensor(total / batches)
        dist.all_reduce(mean)
        if rank == 0 and epoch % 3 == 2:
            print(f"epoch {epoch + 1} loss {mean.item() / world:.5f}")

    with torch.no_grad():
        logits = model(test.features).squeeze(1)
        acc = ((logits > 0).float() == test.labels).float().mean()
    if rank == 0:
        print(f"test loss {bce(logits, test.labels).item():.5f} accuracy {acc.item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
