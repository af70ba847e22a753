"""Two-tower contrastive training (image rows <-> image columns of the same digit), negatives from all ranks."""
import argparse
import math
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.n = x.shape[0]
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous()
        dist.all_reduce(g)
        r = dist.get_rank()
        return g[r * ctx.n:(r + 1) * ctx.n]


class TwoTower(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        mk = lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, dim))
        self.left, self.right = mk(), mk()
        self.logit_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, a, b):
        return F.normalize(self.left(a), dim=1), F.normalize(self.right(b), dim=1), self.logit_scale.exp()


def clip_loss(u, v, scale):
    """Own rows against everybody's columns, in both directions."""
    every_u, every_v = AllGather.apply(u), AllGather.apply(v)
    target = torch.arange(len(u)) + len(u) * dist.get_rank()
    return 0.5 * (F.cross_entropy(scale * u @ every_v.T, target) + F.cross_entropy(scale * v @ every_u.T, target))


@torch.no_grad()
def recall(model, a, b, k=5):
    rank, world = dist.get_rank(), dist.get_world_size()
    lo, hi = len(a) * rank // world, len(a) * (rank + 1) // world
    u, v, _ = model(a[lo:hi], b[lo:hi])
    us, vs = [None] * world, [None] * world
    dist.all_gather_object(us, u)
    dist.all_gather_object(vs, v)
    sims = torch.cat(us) @ torch.cat(vs).T
    top = sims.topk(k, dim=1).indices
    return (top == torch.arange(len(a))[:, None]).any(1).float().mean().item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--epochs", type=int, default=2)
    p.add_argument("--lr", type=float, default=5e-3)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    img = torch.tensor(load_digits().images, dtype=torch.float32) / 16 - 0.3
    left, right = img[:, :4].flatten(1), img[:, 4:].flatten(1)
    n = 1536
    train = TensorDataset(left[:n], right[:n])
    sampler = DistributedSampler(train, seed=15)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(15)
    model = DDP(TwoTower())
    no_decay = [p for p in model.parameters() if p.ndim < 2]
    decay = [p for p in model.parameters() if p.ndim >= 2]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}], lr=args.lr)
    total = args.epochs * len(loader)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / 6, 0.5 * (1 + math.cos(math.pi * s / total))))

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for a, b in loader:
            loss = clip_loss(*model(a, b))
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            with torch.no_grad():
                model.module.logit_scale.clamp_(0, math.log(100))
        show = loss.detach() / world
        dist.all_reduce(show)
        r5 = recall(model.module, left[n:], right[n:])
        if rank == 0:
            print(f"epoch {epoch} loss {show.item():.5f} scale {model.module.logit_scale.exp().item():.3f} recall@5 {r5:.4f}")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
