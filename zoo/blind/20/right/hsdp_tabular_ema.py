"""Friedman regression: FSDP2 on a (replicate, shard) mesh, clipping by global norm, EMA of the sharded weights."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_friedman1
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

BATCH = 120
EPOCHS = 3
EMA_DECAY = 0.85


def start():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


class ResBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.silu(self.up(self.norm(x))))


class TabNet(nn.Module):
    def __init__(self, n_in, width=48, depth=2):
        super().__init__()
        self.stem = nn.Linear(n_in, width)
        self.blocks = nn.ModuleList(ResBlock(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def load():
    x, y = make_friedman1(n_samples=1461, n_features=10, noise=0.5, random_state=2)
    n = 1160
    x = (x - x[:n].mean(0)) / x[:n].std(0)
    y = (y - y[:n].mean()) / y[:n].std()
    x, y = (torch.as_tensor(a, dtype=torch.get_default_dtype()) for a in (x, y[:, None]))
    return (x[:n], y[:n]), (x[n:], y[n:])


class Ema:
    def __init__(self, model, decay):
        self.model, self.decay = model, decay
        self.shadow = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self):
        for s, p in zip(self.shadow, self.model.parameters()):
            s.mul_(self.decay).add_(p.detach(), alpha=1 - self.decay)

    @torch.no_grad()
    def swap(self):
        for s, p in zip(self.shadow, self.model.parameters()):
            kept = p.detach().clone()
            p.copy_(s)
            s.copy_(kept)


@torch.no_grad()
def rmse(model, x, y, rank, world):
    pred = model(x[rank::world])
    total = torch.stack([(pred - y[rank::world]).square().sum(), torch.tensor(float(len(pred)), dtype=pred.dtype)])
    dist.all_reduce(total)
    return (total[0] / total[1]).sqrt().item()


def main():
    rank, world = start()
    shard = min(world, 2)
    mesh = init_device_mesh("cpu", (world // shard, shard), mesh_dim_names=("replicate", "shard"))
    (x, y), (xt, yt) = load()
    torch.manual_seed(11)
    model = TabNet(x.shape[1])
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=1e-2)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, EPOCHS * -(-len(x) // BATCH))
    ema = Ema(model, EMA_DECAY)
    order = torch.Generator().manual_seed(23)

    for epoch in range(EPOCHS):
        perm = torch.randperm(len(x), generator=order)
        norms = []
        for batch in perm.split(BATCH):
            mine = batch.chunk(world)[rank]
            loss = nn.functional.mse_loss(model(x[mine]), y[mine])
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            norms.append(norm.full_tensor().item())
            opt.step()
            opt.zero_grad()
            sched.step()
            ema.update()
        raw = rmse(model, xt, yt, rank, world)
        ema.swap()
        smooth = rmse(model, xt, yt, rank, world)
        ema.swap()
        if rank == 0:
            print(f"epoch {epoch}: mean grad norm {sum(norms) / len(norms):.6f}  rmse {raw:.6f}  rmse(ema) {smooth:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
