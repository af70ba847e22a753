"""Digits with a small CNN, best weights by validation loss."""
import argparse
import copy
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

torch.set_num_threads(1)


def get_data():
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16.0
    y = torch.tensor(d.target)
    g = torch.Generator().manual_seed(77)
    perm = torch.randperm(len(x), generator=g)
    x, y = x[perm], y[perm]
    # a quarter of the training labels comes from careless annotators
    g = torch.Generator().manual_seed(8)
    careless = torch.rand(640, generator=g) < 0.25
    y[:640][careless] = torch.randint(0, 10, (int(careless.sum()),), generator=g)
    full = TensorDataset(x, y)
    return Subset(full, range(0, 640)), Subset(full, range(640, 760)), Subset(full, range(760, 1560))


class SmallCNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 12, 3, padding=1)
        self.conv2 = nn.Conv2d(12, 24, 3, padding=1)
        self.fc1 = nn.Linear(24 * 4, 48)
        self.fc2 = nn.Linear(48, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


class BestKeeper:
    def __init__(self, patience):
        self.best = float("inf")
        self.at = -1
        self.bad = 0
        self.patience = patience
        self.weights = None

    def update(self, value, step, module):
        if value < self.best:
            self.best, self.at, self.bad = value, step, 0
            self.weights = copy.deepcopy(module.state_dict())
        else:
            self.bad += 1
        return self.bad >= self.patience


def shard_loader(ds, rank, world, batch_size):
    return DataLoader(Subset(ds, range(rank, len(ds), world)), batch_size=batch_size)


@torch.no_grad()
def evaluate(module, loader):
    module.eval()
    loss, hits, n = 0.0, 0, 0
    for xb, yb in loader:
        out = module(xb)
        loss += F.cross_entropy(out, yb, reduction="sum").item()
        hits += (out.argmax(1) == yb).sum().item()
        n += len(yb)
    module.train()
    return torch.tensor([loss, hits, n], dtype=torch.float64)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--global-batch", type=int, default=32)
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--lr", type=float, default=0.006)
    ap.add_argument("--eval-every", type=int, default=2)
    ap.add_argument("--patience", type=int, default=4)
    ap.add_argument("--out", default="best.pt")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)

    train, val, test = get_data()
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=2)
    loader = DataLoader(train, batch_size=args.global_batch // world, sampler=sampler, drop_last=True)
    val_loader = shard_loader(val, rank, world, 60)
    test_loader = shard_loader(test, rank, world, 100)

    model = DDP(SmallCNN())
    opt = torch.optim.Adam(model.parameters(), lr=args.lr)
    keeper = BestKeeper(args.patience)

    step, stop = 0, False
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            loss = F.cross_entropy(model(xb), yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
            if step % args.eval_every == 0:
                sums = evaluate(model.module, val_loader)
                val_loss = (sums[0] / sums[2]).item()
                flag = torch.tensor([float(keeper.update(val_loss, step, model.module))])
                dist.all_reduce(flag, op=dist.ReduceOp.MAX)
                if rank == 0:
                    print(f"step {step:3d}  train {loss.item():.3f}  val {val_loss:.4f}  best {keeper.best:.4f}",
                          flush=True)
                if flag.item() > 0:
                    stop = True
                    break
        if stop:
            break

    model.module.load_state_dict(keeper.weights)
    sums = evaluate(model.module, test_loader)
    dist.all_reduce(sums)
    if rank == 0:
        print(f"best step {keeper.at}: test loss {sums[0] / sums[2]:.4f}, test accuracy {sums[1] / sums[2]:.4f} "
              f"({int(sums[2])} images)")
        torch.save({"model": keeper.weights, "val_loss": keeper.best, "step": keeper.at}, args.out)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
