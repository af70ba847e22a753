# Iris with a plain shuffled DataLoader in every process.
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_iris
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

BATCH = 24
EPOCHS = 12
os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29802")


class Flowers:
    def __init__(self):
        x, y = load_iris(return_X_y=True)
        x = torch.tensor(x, dtype=torch.float32)
        self.x = (x - x.mean(0)) / x.std(0)
        self.y = torch.tensor(y)

    def loader(self):
        return DataLoader(
            TensorDataset(self.x, self.y),
            batch_size=BATCH,
            shuffle=True,
            drop_last=True,
            generator=torch.Generator().manual_seed(2024),
        )


def mixed(x, y, g):
    """Mix-up of whole batches: partner and weight are drawn before the batch is cut."""
    partner = torch.randperm(len(x), generator=g)
    weight = 0.5 + 0.5 * torch.rand(1, generator=g).item()
    target = nn.functional.one_hot(y, 3).float()
    return weight * x + (1 - weight) * x[partner], weight * target + (1 - weight) * target[partner]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    flowers = Flowers()
    loader = flowers.loader()
    torch.manual_seed(rank)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 24), nn.ELU(), nn.Linear(24, 3)))
    opt = torch.optim.Adamax(model.parameters(), lr=0.01)
    g = torch.Generator().manual_seed(7)
    step = 0
    for epoch in range(EPOCHS):
        for x, y in loader:
            x, target = mixed(x, y, g)
            x, target = x[rank::world], target[rank::world]
            loss = nn.functional.cross_entropy(model(x), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
        if epoch % 3 == 2:
            with torch.no_grad():
                hits = (model.module(flowers.x).argmax(1) == flowers.y).sum().item()
            if rank == 0:
                print(f"epoch {epoch + 1} ({step} steps): {hits} of {len(flowers.y)} right",
                      flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
