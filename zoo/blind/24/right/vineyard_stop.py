"""Grape sugar from weather: DDP, evaluation on rank 0 only, which also rules the schedule.

Rank 0 owns the plateau scheduler, the early stopping and the best weights; the others are told
the learning rate and when to stop, and receive the best weights at the end."""
import copy
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_regression
from torch.nn.parallel import DistributedDataParallel as DDP


class Foreman:
    """Lives on rank 0."""
    def __init__(self, model, optimizer, val):
        self.model, self.val = model, val
        self.sched = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.02)
        self.opt = optimizer
        self.best, self.best_state, self.bad = float("inf"), None, 0

    @torch.no_grad()
    def judge(self):
        self.model.eval()
        mse = nn.functional.mse_loss(self.model(self.val[0]), self.val[1]).item()
        self.model.train()
        self.sched.step(mse)
        if mse < self.best:
            self.best, self.best_state, self.bad = mse, copy.deepcopy(self.model.state_dict()), 0
        else:
            self.bad += 1
        return mse, self.opt.param_groups[0]["lr"], self.bad >= 2


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = make_regression(180, 25, n_informative=6, noise=60.0, random_state=14)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor((y - y.mean()) / y.std(), dtype=torch.float32)[:, None]
    train, val = (x[:96], y[:96]), (x[96:], y[96:])

    torch.manual_seed(100 + rank)                   # DDP hands out rank 0's weights
    model = nn.Sequential(nn.Linear(25, 48), nn.ReLU(), nn.Linear(48, 1))
    ddp = DDP(model)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.08, momentum=0.9)
    foreman = Foreman(model, opt, val) if rank == 0 else None

    for epoch in range(14):
        gen = torch.Generator().manual_seed(epoch)
        for batch in torch.randperm(96, generator=gen).split(24):
            mine = batch[rank::world]
            loss = nn.functional.mse_loss(ddp(train[0][mine]), train[1][mine])
            opt.zero_grad()
            loss.backward()
            opt.step()
        order = torch.zeros(2, dtype=torch.float64)     # learning rate, stop?
        if foreman is not None:
            mse, lr, stop = foreman.judge()
            print(f"epoch {epoch:2d} val mse {mse:.5f} lr {lr:.5f}" + (" *" if foreman.bad == 0 else ""), flush=True)
            order = torch.tensor([lr, float(stop)], dtype=torch.float64)
        dist.broadcast(order, src=0)
        for group in opt.param_groups:
            group["lr"] = order[0].item()
        if order[1]:
            break

    best = [foreman.best_state if rank == 0 else None]
    dist.broadcast_object_list(best, src=0)
    model.load_state_dict(best[0])
    # everybody checks a part of the validation rows with the weights received
    with torch.no_grad():
        part = (model(val[0][rank::world]) - val[1][rank::world]).abs().sum()
    dist.all_reduce(part)
    if rank == 0:
        print(f"stopped after epoch {epoch}, best mse {foreman.best:.5f}, mean abs error {part.item() / len(val[0]):.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
