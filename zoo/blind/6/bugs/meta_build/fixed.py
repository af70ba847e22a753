"""FSDP2 with a model that is first described on the meta device and then filled shard by shard."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor


class ResidualMLP(nn.Module):
    def __init__(self, n_in, width, depth):
        super().__init__()
        self.stem = nn.Linear(n_in, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU(),
                                                  nn.Linear(width, width)) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x):
        h = self.stem(x)
        for block in self.blocks:
            h = h + block(h)
        return self.head(h).squeeze(-1)


@torch.no_grad()
def fill(model, seed):
    gen = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if p.ndim == 2:
            whole = torch.empty(p.shape).normal_(0, p.shape[1] ** -0.5, generator=gen)
            p.copy_(distribute_tensor(whole, p.device_mesh, p.placements))
        elif "weight" in name:
            p.to_local().fill_(1.0)
        else:
            p.to_local().zero_()


def friedman(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 10, generator=g)
    y = 10 * torch.sin(torch.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4]
    return x, (y - 14.4) / 5 + 0.1 * torch.randn(n, generator=g)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=100)
    ap.add_argument("--width", type=int, default=48)
    ap.add_argument("--depth", type=int, default=2)
    ap.add_argument("--seed", type=int, default=19)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    with torch.device("meta"):
        model = ResidualMLP(10, args.width, args.depth)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    fill(model, args.seed)
    opt = torch.optim.Adam(model.parameters(), lr=2e-3, eps=1e-6)
    x, y = friedman(2000, 1)
    for step in range(args.steps):
        if step % 20 == 0:
            order = torch.randperm(2000, generator=torch.Generator().manual_seed(step))
        rows = order[step % 20 * args.batch:][:args.batch][rank::world]
        loss = F.smooth_l1_loss(model(x[rows]), y[rows])
        loss.backward()
        opt.step()
        opt.zero_grad(set_to_none=True)
        if step % 8 == 0:
            value = loss.detach() / world
            dist.all_reduce(value)
            if rank == 0:
                print(f"step {step}: {value.item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
