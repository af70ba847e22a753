import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29840")

BATCH = 64


class Average:
    """Keeps a running mean of what this process holds of every parameter, and can swap it in."""

    def __init__(self, model, decay=0.95):
        self.model, self.decay = model, decay
        self.kept = [p.detach().to_local().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self):
        for mean, p in zip(self.kept, self.model.parameters()):
            mean.lerp_(p.to_local(), 1 - self.decay)

    @torch.no_grad()
    def swap(self):
        for mean, p in zip(self.kept, self.model.parameters()):
            local = p.to_local()
            old = local.clone()
            local.copy_(mean)
            mean.copy_(old)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    xt, yt, x, y = x[1408:], y[1408:], x[:1408], y[:1408]
    torch.manual_seed(77)
    model = nn.Sequential(nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 50), nn.ReLU(), nn.Linear(50, 10))
    mesh = init_device_mesh("cpu", (world,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.Adam(model.parameters(), lr=5e-3)
    average = Average(model)
    for epoch in range(4):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for rows in order.split(BATCH):
            mine = rows[rank::world]
            loss = F.cross_entropy(model(x[mine]), y[mine])
            opt.zero_grad()
            loss.backward()
            opt.step()
            average.update()
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.reshard()
        average.swap()
        with torch.no_grad():
            part = slice(rank, None, world)
            value = F.cross_entropy(model(xt[part]), yt[part], reduction="sum")
        for layer in model:
            if isinstance(layer, nn.Linear):
                layer.reshard()
        average.swap()
        dist.all_reduce(value)
        if rank == 0:
            print(f"epoch {epoch} averaged weights: {value.item() / len(xt):.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
