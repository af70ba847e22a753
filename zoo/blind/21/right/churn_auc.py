"""Churn scoring on an imbalanced table: class-weighted loss, AUC on held-out customers."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH = 4, 50


def setup():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def make_table(rows, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 18, generator=g)
    score = x[:, 0] * 1.3 - x[:, 3] * x[:, 5] + 0.7 * torch.sin(2 * x[:, 7])
    score = score + 0.6 * torch.randn(rows, generator=g)
    y = (score > 1.6).long()
    return x, y


class Tower(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.inp = nn.Linear(18, width)
        self.norm = nn.LayerNorm(width)
        self.mid = nn.Linear(width, width)
        self.out = nn.Linear(width, 2)

    def forward(self, x):
        h = F.gelu(self.norm(self.inp(x)))
        return self.out(h + F.gelu(self.mid(h)))


def share(ids, rank, world):
    return torch.tensor_split(ids, world)[rank]


@torch.no_grad()
def held_out_auc(net, x, y, rank, world):
    ids = torch.arange(len(x))
    ds = TensorDataset(x, ids)
    sampler = DistributedSampler(ds, world, rank, shuffle=False)
    scores = []
    for xb, _ in DataLoader(ds, batch_size=32, sampler=sampler):
        logits = net(xb)
        scores.append(logits[:, 1] - logits[:, 0])
    mine = torch.cat(scores)
    if world > 1:
        parts = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(parts, mine)
    else:
        parts = [mine]
    full = torch.stack(parts, dim=1).reshape(-1)[: len(x)]
    rank_of = full.argsort().argsort().to(x.dtype) + 1
    pos = int(y.sum())
    neg = len(y) - pos
    return (rank_of[y == 1].sum().item() - pos * (pos + 1) / 2) / (pos * neg)


def main():
    rank, world = setup()
    x, y = make_table(530, seed=3)
    xv, yv = make_table(171, seed=4)
    torch.manual_seed(11)
    net = Tower()
    model = DDP(net) if world > 1 else net
    opt = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.02)
    freq = torch.bincount(y, minlength=2).to(x.dtype)
    weight = len(y) / (2 * freq)

    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(100 + epoch))
        running = torch.zeros(2, dtype=x.dtype)
        for batch in order.split(BATCH):
            total = weight[y[batch]].sum()
            ids = share(batch, rank, world)
            summed = F.cross_entropy(model(x[ids]), y[ids], weight=weight, reduction="sum")
            opt.zero_grad()
            (summed * world / total).backward()
            opt.step()
            running += torch.stack([summed.detach(), weight[y[ids]].sum()])
        if world > 1:
            dist.all_reduce(running)
        net.eval()
        auc = held_out_auc(net, xv, yv, rank, world)
        net.train()
        if rank == 0:
            print(f"epoch {epoch} loss {running[0] / running[1]:.5f} auc {auc:.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
