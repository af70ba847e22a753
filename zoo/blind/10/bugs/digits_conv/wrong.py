"""A convolutional net on the digits; a small test runs after every epoch."""
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29708")
BATCH, EPOCHS = 80, 4


class Net(nn.Module):
    def __init__(self, mean, std):
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.conv = nn.Conv2d(1, 12, 3, padding=1)
        self.norm = nn.GroupNorm(3, 12)
        self.fc = nn.Linear(12 * 16, 10)

    def forward(self, x):
        x = (x - self.mean) / self.std
        x = torch.relu(self.norm(self.conv(x)))
        x = nn.functional.max_pool2d(x, 2)
        return self.fc(x.flatten(1))


@torch.no_grad()
def test(model, loader):
    model.eval()
    hits = seen = 0
    for x, y in loader:
        hits += (model(x).argmax(1) == y).sum().item()
        seen += len(y)
    model.train()
    return hits / seen


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=8))
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8)
    y = torch.tensor(y)
    train = TensorDataset(x[:1440], y[:1440])
    held_out = DataLoader(TensorDataset(x[1440:], y[1440:]), batch_size=119)
    sampler = DistributedSampler(train, seed=3)
    loader = DataLoader(train, batch_size=BATCH // world, sampler=sampler)

    torch.manual_seed(6)
    model = DDP(Net(x[:1440].mean(), x[:1440].std()))
    opt = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss_fn = nn.CrossEntropyLoss()
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for xb, yb in loader:
            loss = loss_fn(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item() * len(yb), len(yb)])
        dist.all_reduce(total)
        if rank == 0:
            accuracy = test(model, held_out)
            print(f"epoch {epoch}: loss {total[0] / total[1]:.5f}, accuracy {accuracy:.4f}", flush=True)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
