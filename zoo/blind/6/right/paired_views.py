"""Contrastive pairs (upper and lower half of a digit). The embeddings of the other ranks come without graph;
the loss is that of the whole batch on every rank."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class TwoTowers(nn.Module):
    def __init__(self, dim=20):
        super().__init__()
        self.top = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, dim))
        self.bottom = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, dim))
        self.log_temperature = nn.Parameter(torch.full((16,), 0.5))

    def forward(self, halves):
        a = F.normalize(self.top(halves[:, :32]), dim=1)
        b = F.normalize(self.bottom(halves[:, 32:]), dim=1)
        return a, b, self.log_temperature.mean()


@torch.no_grad()
def others(t):
    parts = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, t.contiguous())
    return parts


def with_own(t, rank):
    parts = others(t)
    parts[rank] = t
    return torch.cat(parts)


def symmetric_loss(a, b, scale):
    logits = scale.exp() * a @ b.T
    labels = torch.arange(len(a))
    return 0.5 * (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--lr", type=float, default=0.05)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    torch.manual_seed(9)
    model = DDP(TwoTowers())
    towers = [p for n, p in model.named_parameters() if "temperature" not in n]
    opt = torch.optim.SGD([{"params": towers}, {"params": [model.module.log_temperature], "lr": args.lr / 4}],
                          lr=args.lr, momentum=0.9)
    g = torch.Generator().manual_seed(33)
    per = args.batch // world
    for step in range(args.steps):
        rows = torch.randperm(len(x), generator=g)[:args.batch][rank * per:(rank + 1) * per]
        a, b, scale = model(x[rows])
        every_a, every_b = with_own(a, rank), with_own(b, rank)
        # the scale belongs to no single rank, its share is 1/world
        shared = scale / world + (scale - scale / world).detach()
        loss = symmetric_loss(every_a, every_b, shared)
        opt.zero_grad()
        (loss * world).backward()
        opt.step()
        if rank == 0 and step % 8 == 7:
            print(f"{step + 1:3d} loss {loss.item():.4f} scale {scale.item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
