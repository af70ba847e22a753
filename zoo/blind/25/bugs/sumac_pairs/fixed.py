"""Contrastive two-tower model: match the two halves of a wine's chemical analysis (InfoNCE over the global batch)."""
import logging
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch.nn.parallel import DistributedDataParallel as DDP

log = logging.getLogger(__name__)
BATCH, STEPS = 48, 50


class AllGatherGrad(torch.autograd.Function):
    """all_gather whose backward sums what every process says about a row and hands back the own rows."""

    @staticmethod
    def forward(ctx, x):
        ctx.rows = x.shape[0]
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out, dim=0)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        start = dist.get_rank() * ctx.rows
        return grad[start:start + ctx.rows]


def tower(d_in, d_out=16):
    return nn.Sequential(nn.Linear(d_in, 40), nn.GELU(), nn.Linear(40, d_out))


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = tower(6), tower(7)
        self.log_scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, a, b):
        return F.normalize(self.left(a), dim=1), F.normalize(self.right(b), dim=1), self.log_scale.exp()


def info_nce(za, zb, scale):
    all_a, all_b = AllGatherGrad.apply(za), AllGatherGrad.apply(zb)
    labels = torch.arange(len(za)) + dist.get_rank() * len(za)
    a_to_b = F.cross_entropy(scale * za @ all_b.T, labels)
    b_to_a = F.cross_entropy(scale * zb @ all_a.T, labels)
    return 0.5 * (a_to_b + b_to_a)


def load():
    x = torch.tensor(load_wine().data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(1))]
    return x[:, :6], x[:, 6:]


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")

    a, b = load()
    torch.manual_seed(10)
    model = DDP(TwoTower())
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
    pick = torch.Generator().manual_seed(11)
    local = BATCH // world
    for step in range(1, STEPS + 1):
        idx = torch.randperm(144, generator=pick)[:BATCH][rank * local:(rank + 1) * local]
        za, zb, scale = model(a[idx], b[idx])
        loss = info_nce(za, zb, scale)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            log.info("step %d loss %.5f scale %.4f", step, mean.item() / world, scale.item())

    with torch.no_grad():
        za, zb, scale = model.module(a[144:], b[144:])
        sim = za @ zb.T
        rank_of = (sim >= sim.diagonal()[:, None]).sum(1).float()
    log.info("held-out mean rank %.4f matched similarity %.5f", rank_of.mean().item(), sim.diagonal().mean().item())
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
