"""Digits with SGD; processes exchange weights, not gradients, after every step."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits


class WeightMean:
    def __init__(self, params):
        self.params = list(params)

    @torch.no_grad()
    def __call__(self):
        flat = torch.cat([p.view(-1) for p in self.params])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        at = 0
        for p in self.params:
            p.copy_(flat[at:at + p.numel()].view_as(p))
            at += p.numel()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--epochs", type=int, default=4)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 8 - 1, torch.tensor(y)
    test = slice(1500, None)

    torch.manual_seed(13)
    net = nn.Sequential(nn.Linear(64, 80), nn.SiLU(), nn.Linear(80, 40), nn.SiLU(), nn.Linear(40, 10))
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(opt, args.epochs * (1500 // args.batch))
    exchange = WeightMean(net.parameters())
    for epoch in range(args.epochs):
        order = torch.randperm(1500, generator=torch.Generator().manual_seed(epoch))
        for k in range(1500 // args.batch):
            mine = order[k * args.batch:(k + 1) * args.batch].chunk(world)[rank]
            loss = nn.functional.cross_entropy(net(x[mine]), y[mine])
            opt.zero_grad()
            loss.backward()
            opt.step()
            exchange()
            cosine.step()
        with torch.no_grad():
            acc = (net(x[test]).argmax(1) == y[test]).float().mean().item()
        if rank == 0:
            print(f"epoch {epoch} accuracy {acc:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
