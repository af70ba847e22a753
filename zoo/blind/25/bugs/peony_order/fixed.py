"""Tumour classifier (breast cancer table) with DDP and a shuffled order per epoch; prints a few examples after each epoch."""
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

EPOCHS = 6
BATCH = 64


def rows():
    x, y = load_breast_cancer(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    y = torch.tensor(y, dtype=torch.float32)
    return x[:512], y[:512], x[512:], y[512:]


def describe(model, x, y, picks):
    model.eval()
    with torch.no_grad():
        p = torch.sigmoid(model(x[picks])).squeeze(1)
    model.train()
    print("   examples: " + ", ".join(f"{a:.3f}/{int(b)}" for a, b in zip(p.tolist(), y[picks].tolist())))


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2026)

    train_x, train_y, test_x, test_y = rows()
    model = DDP(nn.Sequential(nn.Linear(30, 32), nn.GELU(), nn.Linear(32, 16), nn.GELU(), nn.Linear(16, 1)))
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    loss_fn = nn.BCEWithLogitsLoss()

    for epoch in range(EPOCHS):
        order = torch.randperm(len(train_y))
        total = torch.zeros(())
        batches = order.split(BATCH)
        for batch in batches:
            mine = batch[rank::world]
            loss = loss_fn(model(train_x[mine]).squeeze(1), train_y[mine])
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        dist.all_reduce(total)
        picks = torch.randint(len(test_y), (3,))
        if rank == 0:
            print(f"epoch {epoch} train loss {total.item() / world / len(batches):.5f}")
            describe(model.module, test_x, test_y, picks)

    with torch.no_grad():
        logits = model.module(test_x).squeeze(1)
        if rank == 0:
            print(f"test loss {loss_fn(logits, test_y):.5f} accuracy {((logits > 0) == (test_y > 0.5)).float().mean():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
