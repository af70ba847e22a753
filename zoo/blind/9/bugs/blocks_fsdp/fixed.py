"""Residual MLP on make_classification, sharded with fully_shard."""
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import make_classification
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SEED = 1234
EPOCHS = 2
GLOBAL_BATCH = 64


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, inputs=24, width=32, depth=2, classes=4):
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def setup():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29734")
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def augment(x, gen):
    # the same draw for the whole batch everywhere, cut afterwards
    return x + 0.05 * torch.randn(x.shape, generator=gen)


def main():
    rank, world = setup()
    torch.manual_seed(SEED)
    x, y = make_classification(1280, 24, n_informative=12, n_classes=4, random_state=3)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)

    model = Model()
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    gen = torch.Generator().manual_seed(SEED)

    for epoch in range(EPOCHS):
        perm = torch.randperm(1280, generator=gen)
        total = 0.0
        for start in range(0, 1280, GLOBAL_BATCH):
            idx = perm[start:start + GLOBAL_BATCH]
            xb = augment(x[idx], gen)[rank::world]
            loss = nn.functional.cross_entropy(model(xb), y[idx][rank::world])
            loss.backward()
            opt.step()
            opt.zero_grad()
            total += loss.item()
        mean = torch.tensor(total * GLOBAL_BATCH / 1280 / world)
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch} loss {mean.item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
