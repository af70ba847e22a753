"""Diabetes regression with warm-up and cosine decay."""
import math
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS = 8
GLOBAL_BATCH = 32
WARMUP = 10


def init_distributed():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29757")
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def schedule(optimizer, total):
    def factor(step):
        if step < WARMUP:
            return (step + 1) / WARMUP
        progress = min(1.0, (step - WARMUP) / max(1, total - WARMUP))
        return 0.5 * (1 + math.cos(math.pi * progress))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def main():
    rank, world = init_distributed()
    data = load_diabetes(scaled=True)
    x = torch.tensor(data.data * 20, dtype=torch.float32)
    y = torch.tensor((data.target - data.target.mean()) / data.target.std(), dtype=torch.float32)
    train = TensorDataset(x[:384], y[:384])
    batch = GLOBAL_BATCH // world
    sampler = DistributedSampler(train, shuffle=True, seed=13, drop_last=True)
    loader = DataLoader(train, batch_size=batch, sampler=sampler, drop_last=True)

    torch.manual_seed(13)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    total = EPOCHS * (len(train) // batch)
    scheduler = schedule(optimizer, total)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        running = torch.zeros(())
        for xb, yb in loader:
            loss = nn.functional.mse_loss(model(xb).squeeze(1), yb)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
            running += loss.detach()
        dist.all_reduce(running)
        if rank == 0:
            with torch.no_grad():
                test = nn.functional.mse_loss(model.module(x[384:]).squeeze(1), y[384:]).item()
            print(f"epoch {epoch} train {running.item() / world / len(loader):.5f} test {test:.5f}")

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
