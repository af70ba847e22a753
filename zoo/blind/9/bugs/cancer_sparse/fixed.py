"""Breast cancer: logistic-like MLP with class weights and an L1 term on the first layer."""
import argparse, os, time
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import scale
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=6)
parser.add_argument("--batch", type=int, default=48, help="over all processes")
parser.add_argument("--l1", type=float, default=2e-3)
parser.add_argument("--lr", type=float, default=0.05)


def init():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "30283")
    dist.init_process_group(backend="gloo")


def run(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    raw = load_breast_cancer()
    x = torch.tensor(scale(raw.data), dtype=torch.float32)
    y = torch.tensor(raw.target)
    train = TensorDataset(x[:528], y[:528])
    sampler = DistributedSampler(train, world, rank, shuffle=True, seed=4, drop_last=True)
    loader = DataLoader(train, batch_size=args.batch // world, sampler=sampler)

    torch.manual_seed(4)
    net = DistributedDataParallel(nn.Sequential(nn.Linear(30, 24), nn.ReLU(), nn.Linear(24, 2)))
    first = net.module[0].weight
    class_weight = torch.tensor([1.6, 1.0])
    opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.8)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            # weights of the classes differ, so normalise by the weight in the whole batch
            weight = class_weight[yb].sum()
            dist.all_reduce(weight)
            ce = F.cross_entropy(net(xb), yb, weight=class_weight, reduction="sum")
            penalty = args.l1 * first.abs().sum()
            loss = ce / weight * world + penalty
            opt.zero_grad()
            loss.backward()
            opt.step()
        with torch.no_grad():
            logits = net.module(x[528:])
            held = F.cross_entropy(logits, y[528:]).item()
            small = (first.abs() < 1e-2).sum().item()
        if rank == 0:
            print(f"epoch {epoch} held-out {held:.5f} near-zero weights {small}")


if __name__ == "__main__":
    init()
    run(parser.parse_args())
    time.sleep(0.3)
    dist.destroy_process_group()
