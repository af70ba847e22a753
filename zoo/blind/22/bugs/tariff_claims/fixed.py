"""Claim frequency model (Poisson regression network), parameters sharded with FSDP2."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

torch.set_default_dtype(torch.float64)

REGIONS, MAKES = 12, 20
ROWS, BATCH, EPOCHS = 768, 64, 2
MAX_NORM = 0.25


def make_policies():
    g = torch.Generator().manual_seed(5)
    region = torch.randint(0, REGIONS, (ROWS,), generator=g)
    make = torch.randint(0, MAKES, (ROWS,), generator=g)
    numeric = torch.randn(ROWS, 6, generator=g)
    exposure = 0.2 + 0.8 * torch.rand(ROWS, generator=g)
    w_region = 0.5 * torch.randn(REGIONS, generator=g)
    w_make = 0.7 * torch.randn(MAKES, generator=g)
    log_rate = 0.3 + w_region[region] + w_make[make] + 0.4 * numeric[:, 0] * numeric[:, 1] - 0.3 * numeric[:, 2]
    claims = torch.poisson(exposure * log_rate.clamp(max=2.5).exp(), generator=g)
    return region, make, numeric, exposure, claims


class Tower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.silu(self.up(self.norm(x))))


class TariffNet(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.region = nn.Embedding(REGIONS, width)
        self.make = nn.Embedding(MAKES, width)
        self.numeric = nn.Linear(6, width)
        self.towers = nn.ModuleList(Tower(width) for _ in range(2))
        self.out = nn.Linear(width, 1)

    def forward(self, region, make, numeric):
        x = self.region(region) + self.make(make) + self.numeric(numeric)
        for tower in self.towers:
            x = tower(x)
        return self.out(x)


@torch.no_grad()
def clip_gradients(parameters, max_norm):
    grads = [p.grad.to_local() for p in parameters if p.grad is not None]
    squares = torch.stack([g.square().sum() for g in grads]).sum()
    dist.all_reduce(squares)
    norm = squares.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for g in grads:
        g.mul_(factor)
    return norm


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        path = os.path.join(tempfile.mkdtemp(), "rendezvous")
        dist.init_process_group("gloo", init_method=f"file://{path}", rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))

    region, make, numeric, exposure, claims = make_policies()
    torch.manual_seed(1)
    model = TariffNet()
    for tower in model.towers:
        fully_shard(tower, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    for epoch in range(EPOCHS):
        order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(100 + epoch))
        seen, deviance = 0, torch.zeros(())
        for rows in order.split(BATCH):
            rows = rows[rank::world]
            score = model(region[rows], make[rows], numeric[rows]).squeeze(-1)
            log_mean = score + exposure[rows].log()
            loss = F.poisson_nll_loss(log_mean, claims[rows], log_input=True)
            optimizer.zero_grad()
            loss.backward()
            clip_gradients(model.parameters(), MAX_NORM)
            optimizer.step()
            deviance += loss.detach()
            seen += 1
        dist.all_reduce(deviance)
        if rank == 0:
            print(f"epoch {epoch} poisson loss {deviance.item() / (seen * world):.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
