"""Fixed batch per process; the learning rate grows linearly with the global batch and is warmed up."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

BASE_BATCH = 32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(64, 96)
        self.b = nn.Linear(96, 96)
        self.c = nn.Linear(96, 10)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return self.c(h + torch.tanh(self.b(h)))


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    train = TensorDataset(x[:1536], y[:1536])
    sampler = DistributedSampler(train, seed=args.seed)
    loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)

    torch.manual_seed(args.seed)
    model = DDP(Net())
    peak = args.lr * args.batch_size * world / BASE_BATCH
    opt = torch.optim.SGD(model.parameters(), lr=peak, momentum=0.9, nesterov=True)
    total = args.epochs * len(loader)
    warm = max(1, total // 5)

    def factor(step):
        if step < warm:
            return (step + 1) / warm
        return 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))

    sched = torch.optim.lr_scheduler.LambdaLR(opt, factor)
    if rank == 0:
        print(f"{world} processes, global batch {args.batch_size * world}, peak rate {peak:.4f}, {total} steps")
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        running = 0.0
        for bx, by in loader:
            loss = nn.functional.cross_entropy(model(bx), by)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            running += loss.item() / len(loader)
        t = torch.tensor(running, dtype=torch.float64)
        dist.reduce(t, 0)
        if rank == 0:
            with torch.no_grad():
                acc = (model.module(x[1536:]).argmax(1) == y[1536:]).float().mean()
            print(f"epoch {epoch} loss {t.item() / world:.5f} held out {acc.item():.4f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=16)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--seed", type=int, default=0)
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29711").items():
        os.environ.setdefault(k, v)
    main(ap.parse_args())
