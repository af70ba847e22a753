import time

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

torch.set_num_threads(1)

EPOCHS = 2
BATCH = 96
WORKERS = 3
HOLDOUT = 357


class DigitStream(IterableDataset):
    def __init__(self, images, labels, rank, world_size, seed=0):
        self.images, self.labels = images, labels
        self.rank, self.world_size = rank, world_size
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def _records(self):
        order = np.random.default_rng([self.seed, self.epoch]).permutation(len(self.images))
        for i in order:
            yield self.images[i], self.labels[i]

    def __iter__(self):
        info = get_worker_info()
        worker_id, num_workers = (info.id, info.num_workers) if info is not None else (0, 1)
        shard = self.rank * self.world_size + worker_id
        num_shards = self.world_size * num_workers
        for n, record in enumerate(self._records()):
            if n % num_shards == shard:
                yield record


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        )
        self.fc = nn.Linear(24 * 4, 10)

    def forward(self, x):
        return self.fc(self.features(x).flatten(1))


dist.init_process_group(backend="gloo")
rank = dist.get_rank()
world_size = dist.get_world_size()
torch.manual_seed(0)

digits = load_digits()
images = torch.from_numpy(digits.images).float().unsqueeze(1) / 16
labels = torch.from_numpy(digits.target).long()
test_x, test_y = images[-HOLDOUT:], labels[-HOLDOUT:]

stream = DigitStream(images[:-HOLDOUT], labels[:-HOLDOUT], rank, world_size, seed=5)
loader = DataLoader(stream, batch_size=BATCH // world_size, num_workers=WORKERS)

net = DDP(ConvNet())
optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True)
criterion = nn.CrossEntropyLoss()

step = 0
for epoch in range(EPOCHS):
    stream.set_epoch(epoch)
    net.train()
    for xb, yb in loader:
        optimizer.zero_grad()
        loss = criterion(net(xb), yb)
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % 5 == 0:
            print(f"[{epoch}/{step:03d}] loss={loss.item():.4f}", flush=True)
    net.eval()
    with torch.no_grad():
        acc = (net.module(test_x).argmax(1) == test_y).float().mean().item()
    if rank == 0:
        print(f"epoch {epoch}: accuracy {acc:.4f} after {step} steps", flush=True)

dist.barrier()
time.sleep(0.3)
dist.destroy_process_group()
