"""Rare fraud among payments: train a scorer, choose the alarm threshold on validation rows, report F1 on test rows."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def payments(count, seed):
    g = torch.Generator().manual_seed(seed)
    y = (torch.rand(count, generator=g) < 0.1).double()
    x = torch.randn(count, 12, generator=g).double()
    x[:, :4] += 0.9 * y[:, None]
    x[:, 4] *= 1 + y
    return x, y


@torch.no_grad()
def scores(net, x, y, rank, world):
    own = slice(rank, None, world)
    return net(x[own]).squeeze(1).sigmoid(), y[own]


def gather(t, world):
    parts = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(parts, t.contiguous())
    return torch.cat(parts)


def counts(score, label, threshold):
    alarm = (score >= threshold).double()
    return torch.stack([(alarm * label).sum(), alarm.sum(), label.sum()])


def f1(c):
    return (2 * c[0] / (c[1] + c[2]).clamp(min=1)).item()


def best_threshold(score, label):
    return max(sorted(score.tolist()), key=lambda t: f1(counts(score, label, t)))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=0.2)
    args = p.parse_args()

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    x, y = payments(1600, seed=3)
    train, valid, test = (slice(0, 640), slice(640, 1040), slice(1040, 1600))
    net = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))
    model = DDP(net)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        total = torch.zeros(())
        for rows in torch.randperm(640, generator=torch.Generator().manual_seed(epoch)).split(args.batch):
            rows = rows[rank::world]
            loss = F.binary_cross_entropy_with_logits(model(x[train][rows]).squeeze(1), y[train][rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach() * len(rows)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total / 640:.5f}")

    score, label = scores(net, x[valid], y[valid], rank, world)
    threshold = best_threshold(score, label)
    score, label = scores(net, x[test], y[test], rank, world)
    c = counts(score, label, threshold)
    dist.all_reduce(c)
    if rank == 0:
        print(f"alarms {int(c[1])} found {int(c[0])} of {int(c[2])} F1 {f1(c):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
