"""Accumulation over windows; the last window of an epoch is shorter than the others."""
import contextlib
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import make_regression
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

MICRO = 8       # rows of one process in one backward
WINDOW = 96     # rows of one optimizer step
EPOCHS = 5


def environment():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29807")


def in_windows(loader, size):
    window = []
    for batch in loader:
        window.append(batch)
        if len(window) == size:
            yield window
            window = []
    if window:
        yield window


def main():
    environment()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_regression(1120, 15, n_informative=10, noise=4.0, random_state=6)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y / y.std(), dtype=torch.float32))
    sampler = DistributedSampler(data, shuffle=True, seed=9)
    loader = DataLoader(data, batch_size=MICRO, sampler=sampler)
    torch.manual_seed(8)
    model = DDP(nn.Sequential(nn.Linear(15, 32), nn.ReLU(), nn.Linear(32, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=25, gamma=0.5)
    per_window = WINDOW // MICRO // world
    steps = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        spent = torch.zeros(2)
        for window in in_windows(loader, per_window):
            rows = sum(len(b) for _, b in window)
            opt.zero_grad()
            for k, (xb, yb) in enumerate(window):
                last = k + 1 == len(window)
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = (model(xb).squeeze(1) - yb).square().sum() / rows
                    loss.backward()
                spent += torch.tensor([loss.item() * rows, len(yb)])
            opt.step()
            sched.step()
            steps += 1
        dist.all_reduce(spent)
        if rank == 0:
            print(f"epoch {epoch}: {steps} steps, loss {spent[0] / spent[1]:.5f} over {int(spent[1])} rows", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
