"""Disease progression from ten measurements; stops when the held-out error no longer falls."""
import argparse
import contextlib
import copy
import math
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Stopper:
    def __init__(self, patience, min_delta):
        self.patience, self.min_delta = patience, min_delta
        self.best, self.bad = math.inf, 0
        self.weights = None

    def update(self, error, model):
        if error < self.best - self.min_delta:
            self.best, self.bad = error, 0
            self.weights = copy.deepcopy(model.state_dict())
        else:
            self.bad += 1
        return self.bad >= self.patience


def tables(held_out=121):
    x, y = load_diabetes(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) * 20, torch.tensor(y, dtype=torch.float32)
    y = (y - y.mean()) / y.std()
    perm = torch.randperm(len(x), generator=torch.Generator().manual_seed(2))
    test, train = perm[:held_out], perm[held_out:]
    return (x[train], y[train]), (x[test], y[test])


def squared_errors(model, x, y):
    model.eval()
    with torch.no_grad():
        err = (model(x).squeeze(1) - y).square().sum()
    model.train()
    return torch.stack([err, torch.tensor(float(len(y)))])


def over_all(stats):
    out = stats.clone()
    dist.all_reduce(out)
    return out


def train(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    (x, y), (vx, vy) = tables()
    vx, vy = vx[rank::world], vy[rank::world]
    torch.manual_seed(args.seed)
    net = nn.Sequential(nn.Linear(10, 64), nn.Tanh(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    stopper = Stopper(args.patience, args.min_delta)
    window = args.micro * args.accumulate * world
    micro = args.micro
    shuffler = torch.Generator().manual_seed(args.seed)

    for epoch in range(args.epochs):
        perm = torch.randperm(len(x), generator=shuffler)
        for at in range(0, len(perm) - window + 1, window):
            mine = perm[at:at + window].view(args.accumulate, world, micro)[:, rank]
            optimizer.zero_grad()
            for k, rows in enumerate(mine):
                last = k == args.accumulate - 1
                with contextlib.nullcontext() if last else model.no_sync():
                    loss = nn.functional.mse_loss(model(x[rows]).squeeze(1), y[rows])
                    (loss / args.accumulate).backward()
            optimizer.step()

        stats = squared_errors(net, vx, vy)
        total = over_all(stats)
        error = (total[0] / total[1]).item()
        if rank == 0:
            print(f"epoch {epoch} held-out mse {error:.5f} on {int(total[1])} rows", flush=True)
        stop = torch.tensor(float(stopper.update((stats[0] / stats[1]).item(), net)))
        dist.broadcast(stop, src=0)
        if stop.item():
            break

    net.load_state_dict(stopper.weights)
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    final = over_all(squared_errors(net, vx, vy))
    if rank == 0:
        print(f"kept epoch error {(final[0] / final[1]).item():.5f} after {epoch + 1} epochs")
    return net


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=14)
    p.add_argument("--micro", type=int, default=0, help="rows per micro-batch and process; 0: share of 32")
    p.add_argument("--accumulate", type=int, default=2)
    p.add_argument("--lr", type=float, default=0.005)
    p.add_argument("--patience", type=int, default=2)
    p.add_argument("--min-delta", type=float, default=1e-3)
    p.add_argument("--seed", type=int, default=5)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    args.micro = args.micro or 32 // dist.get_world_size()
    model = train(args)
    time.sleep(0.3)
    dist.destroy_process_group()
