# Load forecasting: predict the next value of several meters from a window. Each process reads only its own rows.
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
WINDOW, METERS, GLOBAL_BATCH = 24, 6, 48


def read_rows(rank, world, n=960):
    """Windows are stored meter by meter in blocks; process r takes every world-th window."""
    rng = np.random.default_rng(33)
    t = np.arange(n + WINDOW)
    level = rng.uniform(5, 400, METERS)
    series = np.stack([lv * (1 + 0.4 * np.sin(2 * np.pi * t / 24 + rng.uniform(0, 6)) + 0.1 * rng.standard_normal(len(t)))
                       for lv in level])
    meter = np.arange(n) % METERS
    x = np.stack([series[m, i:i + WINDOW] for i, m in enumerate(meter)])
    y = np.array([series[m, i + WINDOW] for i, m in enumerate(meter)])
    return x[rank::world].astype(np.float32), y[rank::world].astype(np.float32)


class Standardizer:
    def fit(self, x):
        n = float(x.size)
        stats = torch.tensor([n, x.sum(dtype=np.float64), np.square(x, dtype=np.float64).sum()], dtype=torch.float64)
        dist.all_reduce(stats)
        count, total, squares = stats.tolist()
        self.mean = total / count
        self.std = (squares / count - self.mean ** 2) ** 0.5
        return self

    def __call__(self, a):
        return torch.from_numpy((a - np.float32(self.mean)) / np.float32(self.std))


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(1, 16, 5, padding=2)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(16 * WINDOW, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x):
        return self.head(torch.relu(self.conv(x.unsqueeze(1)))).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    raw_x, raw_y = read_rows(rank, world)
    scale = Standardizer().fit(raw_x)
    x, y = scale(raw_x), scale(raw_y)
    if rank == 0:
        print(f"rows {len(x)} mean {scale.mean:.2f} std {scale.std:.2f}")
    model = DDP(Forecaster())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=40)
    per = GLOBAL_BATCH // world
    for epoch in range(2):
        for lo in range(0, len(x), per):
            loss = nn.functional.mse_loss(model(x[lo:lo + per]), y[lo:lo + per])
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} mse {total.item() / world:.5f}")
    if rank == 0:
        torch.save({"model": model.module.state_dict(), "mean": scale.mean, "std": scale.std}, "forecaster.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
