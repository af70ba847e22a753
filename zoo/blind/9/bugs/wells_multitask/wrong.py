"""Eight related regression tasks with a shared trunk; gradients are averaged by hand."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_regression

TASKS = 8
BATCH = 64
STEPS = 80


class MultiTask(nn.Module):
    def __init__(self, inputs, width=32):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(width, 1) for _ in range(TASKS))

    def forward(self, x):
        h = self.trunk(x)
        return torch.cat([head(h) for head in self.heads], dim=1)


class Averager:
    """All-reduces trunk and heads; asynchronous, everything is waited for at the end."""

    def __init__(self, model):
        self.model = model
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def __call__(self):
        work = []
        for p in self.model.trunk.parameters():
            work.append((p, dist.all_reduce(p.grad, async_op=True)))
        for k in range(TASKS):
            head = self.model.heads[(k + self.rank) % TASKS]  # spread the load
            for p in head.parameters():
                work.append((p, dist.all_reduce(p.grad, async_op=True)))
        for p, handle in work:
            handle.wait()
            p.grad /= self.world


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "30352")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = make_regression(960, 12, n_informative=8, n_targets=TASKS, noise=2.0, random_state=5)
    x = torch.tensor(x, dtype=torch.float32)
    y = torch.tensor(y / y.std(0), dtype=torch.float32)

    torch.manual_seed(40)
    model = MultiTask(12)
    average = Averager(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    gen = torch.Generator().manual_seed(41)

    for step in range(STEPS):
        idx = torch.randperm(len(x), generator=gen)[:BATCH][rank::world]
        loss = (model(x[idx]) - y[idx]).square().mean()
        opt.zero_grad(set_to_none=True)
        loss.backward()
        average()
        opt.step()
        if step % 20 == 19:
            with torch.no_grad():
                errors = (model(x) - y).square().mean(0)
            if rank == 0:
                print(f"step {step + 1}:", " ".join(f"{e:.5f}" for e in errors.tolist()))

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
