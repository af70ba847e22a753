"""Temporal ensembling on digits: few labels, consistency with an average of past predictions of every image.

    torchrun --nproc-per-node=2 train.py --epochs 2
    torchrun --nproc-per-node=2 train.py --epochs 4 --resume runs/tempens/last.pt
"""
import argparse
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Dropout(0.2), nn.Linear(96, 48), nn.ReLU())
        self.head = nn.Linear(48, 10)

    def forward(self, x):
        return self.head(self.body(x))


def rampup(epoch, length=4):
    t = min(epoch / length, 1.0)
    return math.exp(-5.0 * (1.0 - t) ** 2)


def save(path, epoch, model, opt, ensemble, rank):
    if rank == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save({"epoch": epoch, "model": model.module.state_dict(), "optimizer": opt.state_dict(),
                    "ensemble": ensemble}, path)
    dist.barrier()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--global-batch", type=int, default=64)
    ap.add_argument("--alpha", type=float, default=0.6)
    ap.add_argument("--w-max", type=float, default=4.0)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--labelled", type=int, default=200)
    ap.add_argument("--resume", default="")
    ap.add_argument("--out", default="runs/tempens/last.pt")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    d = load_digits()
    x = torch.tensor(d.data, dtype=torch.float32) / 16.0
    y = torch.tensor(d.target)
    n = 1024
    x_train, y_train, x_test, y_test = x[:n], y[:n].clone(), x[n:], y[n:]
    y_train[args.labelled:] = -1
    mine = torch.arange(rank, n, world)

    torch.manual_seed(0)
    model = DDP(Net())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    ensemble = torch.zeros(n, 10)
    start = 0
    if args.resume:
        ck = torch.load(args.resume)
        model.module.load_state_dict(ck["model"])
        opt.load_state_dict(ck["optimizer"])
        ensemble[mine] = ck["ensemble"][mine]
        start = ck["epoch"] + 1

    for epoch in range(start, args.epochs):
        torch.manual_seed(1000 * epoch + rank)
        order = mine[torch.randperm(len(mine), generator=torch.Generator().manual_seed(epoch))]
        weight = args.w_max * rampup(epoch) * (args.labelled / n)
        correction = 1.0 - args.alpha ** epoch
        total = torch.zeros(2)
        for ids in order.split(args.global_batch // world):
            logits = model(x_train[ids])
            prob = logits.softmax(1)
            labels = y_train[ids]
            sup = F.cross_entropy(logits, labels, ignore_index=-1, reduction="sum") / len(ids)
            if epoch > 0:
                target = ensemble[ids] / correction
                cons = F.mse_loss(prob, target)
            else:
                cons = torch.zeros(())
            loss = sup + weight * cons
            opt.zero_grad()
            loss.backward()
            opt.step()
            ensemble[ids] = args.alpha * ensemble[ids] + (1.0 - args.alpha) * prob.detach()
            total += torch.tensor([sup.item(), cons.item()]) * len(ids)
        dist.all_reduce(total)
        model.eval()
        with torch.no_grad():
            hit = (model.module(x_test).argmax(1) == y_test).float().mean().item()
        model.train()
        if rank == 0:
            print(f"epoch {epoch}: supervised {total[0] / n:.4f}  consistency {total[1] / n:.5f}  test {hit:.4f}",
                  flush=True)
        save(args.out, epoch, model, opt, ensemble, rank)

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
