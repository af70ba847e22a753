"""Endless-looking stream read by loader workers; whole micro-batches are dealt out to processes and workers."""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Sines(IterableDataset):
    """Forecast the next value of noisy sums of sines. Sample i is made from seed i alone."""

    def __init__(self, steps, global_batch, rank, world):
        self.steps, self.batch, self.rank, self.world = steps, global_batch, rank, world

    @staticmethod
    def sample(i):
        rng = np.random.default_rng([20, i])
        freq, phase, amp = rng.uniform(0.1, 0.9, 3), rng.uniform(0, 6.28, 3), rng.uniform(0.2, 1, 3)
        t = np.arange(33)[:, None]
        s = (amp * np.sin(freq * t + phase)).sum(1) + rng.normal(0, 0.05, 33)
        return torch.tensor(s, dtype=torch.float32)

    def __iter__(self):
        info = get_worker_info()
        k, n = (info.id, info.num_workers) if info else (0, 1)
        per = self.batch // self.world
        for step in range(k, self.steps, n):
            start = step * self.batch + self.rank * per
            rows = torch.stack([self.sample(i) for i in range(start, start + per)])
            yield rows[:, :32], rows[:, 32]


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 16, 5, stride=2)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(16 * 14, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.head(torch.relu(self.conv(x.unsqueeze(1)))).squeeze(1)


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29714").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    loader = DataLoader(Sines(40, 32, rank, world), batch_size=None, num_workers=2)
    torch.manual_seed(4)
    model = DDP(Forecaster())
    opt = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    meter = torch.zeros(2)
    for step, (x, y) in enumerate(loader, 1):
        loss = nn.functional.mse_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        meter += torch.tensor([loss.item() * len(y), len(y)])
        if step % 10 == 0:
            dist.all_reduce(meter)
            if rank == 0:
                print(f"step {step} mse {meter[0].item() / meter[1].item():.5f} over {int(meter[1])} series")
            meter.zero_()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
