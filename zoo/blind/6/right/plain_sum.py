"""FSDP2 on a mesh of replicas and shards; the loss is a sum, so reductions are told not to divide."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


class SetEncoder(nn.Module):
    """Sets of points of varying size -> which of some shapes they were drawn from."""

    def __init__(self, width=36, kinds=4):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, width))
        self.query = nn.Linear(width, 4, bias=False)
        self.head = nn.Sequential(nn.Linear(4 * width, width), nn.GELU(), nn.Linear(width, kinds))

    def forward(self, pts, mask):
        h = self.point(pts)
        att = self.query(h).masked_fill(~mask[..., None], -1e9).softmax(1)
        return self.head((att.transpose(1, 2) @ h).flatten(1))


def shapes(n, seed):
    g = torch.Generator().manual_seed(seed)
    kind = torch.randint(4, (n,), generator=g)
    t = torch.rand(n, 20, generator=g) * 6.283
    r = torch.ones(n, 20)
    r = torch.where(kind[:, None] == 1, 0.3 + t / 8, r)
    r = torch.where(kind[:, None] == 2, torch.cos(2 * t), r)
    r = torch.where(kind[:, None] == 3, torch.rand(n, 20, generator=g).sqrt(), r)
    pts = torch.stack([r * t.cos(), r * t.sin()], -1) + 0.05 * torch.randn(n, 20, 2, generator=g)
    size = torch.randint(6, 21, (n, 1), generator=g)
    return pts, torch.arange(20)[None] < size, kind, size[:, 0].float()


def shard(model, world):
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
    parts = [model.point, model.head, model]
    for m in parts:
        fully_shard(m, mesh=mesh)
    for m in parts:
        m.set_gradient_divide_factor(1.0)
    return mesh


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    pts, mask, kind, size = shapes(1200, 3)
    torch.manual_seed(1234)
    model = SetEncoder()
    shard(model, world)
    opt = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    g = torch.Generator().manual_seed(0)
    # the first ranks get more rows than the last
    cuts = [round(args.batch * (r / world) ** 0.7) for r in range(world + 1)]
    for step in range(args.steps):
        rows = torch.randperm(1200, generator=g)[:args.batch]
        whole = size[rows].sum()
        rows = rows[cuts[rank]:cuts[rank + 1]]
        each = F.cross_entropy(model(pts[rows], mask[rows]), kind[rows], reduction="none")
        loss = (each * size[rows]).sum() / whole
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 8 == 7:
            total = loss.detach().clone()
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step + 1} loss {total.item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
