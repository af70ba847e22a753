import argparse
import copy

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def get_loaders(args, world):
    d = load_digits()
    x = torch.tensor(d.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(d.target)
    train, val = TensorDataset(x[:960], y[:960]), TensorDataset(x[960:1440], y[960:1440])
    ts = DistributedSampler(train, shuffle=True, seed=args.seed, drop_last=True)
    vs = DistributedSampler(val, shuffle=False)
    return DataLoader(train, args.batch // world, sampler=ts), DataLoader(val, args.batch // world, sampler=vs), ts


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Conv2d(6, 12, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10),
    )


@torch.no_grad()
def validate(net, loader, loss_fn):
    net.eval()
    meter = torch.zeros(3, dtype=torch.float64)  # loss, correct, count
    for x, y in loader:
        out = net(x)
        meter[0] += loss_fn(out, y).item() * len(y)
        meter[1] += (out.argmax(1) == y).sum().item()
        meter[2] += len(y)
    dist.all_reduce(meter)
    net.train()
    return (meter[0] / meter[2]).item(), (meter[1] / meter[2]).item()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=96)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--seed", type=int, default=13)
    p.add_argument("--save", default="best.pt")
    args = p.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    train, val, sampler = get_loaders(args, world)
    net = make_model()
    ddp = DDP(net)
    loss_fn = nn.CrossEntropyLoss()
    opt = torch.optim.Adam(ddp.parameters(), lr=6e-3)
    best, best_state = float("inf"), None
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in train:
            opt.zero_grad()
            loss_fn(ddp(x), y).backward()
            opt.step()
        val_loss, val_acc = validate(net, val, loss_fn)
        if rank == 0:
            print(f"epoch {epoch}  val loss {val_loss:.4f}  val acc {100 * val_acc:.2f}%", flush=True)
        if val_loss < best:
            best, best_state = val_loss, copy.deepcopy(net.state_dict())
    if rank == 0:
        torch.save({"state": best_state, "val_loss": best}, args.save)
        print(f"best val loss {best:.4f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
