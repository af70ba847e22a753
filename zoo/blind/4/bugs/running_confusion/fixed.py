"""Small convnet on digits; macro F1 over several validation domains, reported as they come in."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP


class ConfusionMeter:
    def __init__(self, classes):
        self.matrix = torch.zeros(classes, classes, dtype=torch.float64)

    def update(self, logits, labels):
        n = self.matrix.size(0)
        flat = torch.bincount(labels * n + logits.argmax(1), minlength=n * n)
        self.matrix += flat.view(n, n)

    def summary(self):
        matrix = self.matrix.clone()
        dist.all_reduce(matrix)
        hit = matrix.diag()
        f1 = 2 * hit / (matrix.sum(0) + matrix.sum(1)).clamp(min=1)
        return {"macro_f1": f1.mean().item(), "accuracy": (hit.sum() / matrix.sum()).item()}


def build_data(seed):
    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(y)
    g = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(images), generator=g)
    images, labels = images[order], labels[order]
    train = images[:1280], labels[:1280]
    held_x, held_y = images[1280:], labels[1280:]
    third = len(held_x) // 3
    domains = {
        "clean": (held_x[:third], held_y[:third]),
        "shifted": (torch.roll(held_x[third:2 * third], 1, dims=-1), held_y[third:2 * third]),
        "noisy": (held_x[2 * third:] + 0.35 * torch.randn(held_x[2 * third:].shape, generator=g),
                  held_y[2 * third:]),
    }
    return train, domains


def convnet():
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 16, 10))


@torch.no_grad()
def evaluate(net, domains, rank, world, chunk=64):
    net.eval()
    meter = ConfusionMeter(10)
    table = {}
    for name, (x, y) in domains.items():
        mine_x, mine_y = x[rank::world], y[rank::world]
        for i in range(0, len(mine_x), chunk):
            meter.update(net(mine_x[i:i + chunk]), mine_y[i:i + chunk])
        table[f"up to {name}"] = meter.summary()
    net.train()
    return table


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch", type=int, default=64, help="over all processes")
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--seed", type=int, default=3)
    opt = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group(backend="gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(opt.seed)
    (train_x, train_y), domains = build_data(opt.seed)
    ddp = DDP(convnet())
    optim = ZeroRedundancyOptimizer(ddp.parameters(), optimizer_class=torch.optim.Adam, lr=opt.lr)

    for epoch in range(opt.epochs):
        g = torch.Generator().manual_seed(1000 * opt.seed + epoch)
        order = torch.randperm(len(train_x), generator=g)
        for start in range(0, len(order) - opt.batch + 1, opt.batch):
            rows = order[start:start + opt.batch][rank::world]
            loss = F.cross_entropy(ddp(train_x[rows]), train_y[rows])
            optim.zero_grad()
            loss.backward()
            optim.step()
        for name, scores in evaluate(ddp.module, domains, rank, world).items():
            if rank == 0:
                print(f"epoch {epoch} {name:14s} macro F1 {scores['macro_f1']:.6f} accuracy {scores['accuracy']:.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
