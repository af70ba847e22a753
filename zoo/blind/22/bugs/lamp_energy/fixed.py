"""Forecast of street lamp energy from weather and calendar features; warmup + cosine decay."""
import math
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 64
EPOCHS = 4
PEAK_LR = 0.02


def build_dataset(n, seed):
    g = torch.Generator().manual_seed(seed)
    hour = 24 * torch.rand(n, generator=g)
    day = 365 * torch.rand(n, generator=g)
    cloud = torch.rand(n, generator=g)
    temp = torch.randn(n, generator=g)
    features = torch.stack([
        torch.sin(hour * math.pi / 12), torch.cos(hour * math.pi / 12),
        torch.sin(day * 2 * math.pi / 365), torch.cos(day * 2 * math.pi / 365),
        cloud, temp,
    ], dim=1)
    darkness = torch.sigmoid(3 * (features[:, 1] + 0.5 * features[:, 3] + 0.4 * (cloud - 0.5)))
    energy = darkness * (1.0 - 0.05 * temp) + 0.05 * torch.randn(n, generator=g)
    return TensorDataset(features, energy)


class LampNet(nn.Module):
    def __init__(self, hidden=64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(6, hidden), nn.SiLU(),
            nn.Linear(hidden, hidden), nn.SiLU(),
            nn.Linear(hidden, 1),
        )

    def forward(self, x):
        return self.body(x).squeeze(-1)


def warmup_cosine(total_steps, warmup_steps):
    def factor(step):
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return factor


@torch.no_grad()
def evaluate(model, dataset, rank, world):
    x, y = dataset.tensors
    error = (model(x[rank::world]) - y[rank::world]).square().sum()
    dist.all_reduce(error)
    return (error / len(dataset)).sqrt().item()


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    train_set, test_set = build_dataset(1280, 1), build_dataset(400, 2)
    sampler = DistributedSampler(train_set, num_replicas=world, rank=rank, shuffle=True, seed=17)
    loader = DataLoader(train_set, batch_size=GLOBAL_BATCH // world, sampler=sampler)

    torch.manual_seed(0)
    model = DistributedDataParallel(LampNet())
    optimizer = torch.optim.SGD(model.parameters(), lr=PEAK_LR, momentum=0.9, nesterov=True)
    steps_per_epoch = len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, warmup_cosine(EPOCHS * steps_per_epoch, warmup_steps=8))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        running = torch.zeros(())
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            running += loss.detach()
        dist.all_reduce(running)
        rmse = evaluate(model.module, test_set, rank, world)
        if rank == 0:
            mean = running.item() / (len(loader) * world)
            print(f"epoch {epoch} train mse {mean:.6f} test rmse {rmse:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
