"""Post-local SGD with PyTorch's own hook and averager: gradients are averaged at first, later the weights, after every step."""
import argparse
import os
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

warnings.filterwarnings("ignore", message="When period is 1")


def build_loader(batch):
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
    train, test = torch.utils.data.random_split(data, [1344, len(data) - 1344], generator=torch.Generator().manual_seed(0))
    sampler = DistributedSampler(train, seed=17)
    return DataLoader(train, batch // dist.get_world_size(), sampler=sampler), DataLoader(test, 64), sampler


def lr_at(step, base, warmup, last):
    if step < warmup:
        return base * (step + 1) / warmup
    return base * (1 - (step - warmup) / (last - warmup + 1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=84)
    parser.add_argument("--start-local", type=int, default=14)
    parser.add_argument("--lr", type=float, default=0.3)
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = DDP(nn.Sequential(nn.Linear(64, 72), nn.Tanh(), nn.Linear(72, 32), nn.Tanh(), nn.Linear(32, 10)))
    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=args.start_local, post_local_gradient_allreduce=False)
    model.register_comm_hook(state, post_localSGD_hook)
    optimizer = PostLocalSGDOptimizer(
        optim=torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-3),
        averager=PeriodicModelAverager(period=1, warmup_steps=args.start_local))
    loader, test, sampler = build_loader(args.batch)
    step, last = 0, args.epochs * len(loader)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            for group in optimizer.param_groups:
                group["lr"] = lr_at(step, args.lr, 6, last)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            total += loss.detach()
            step += 1
        dist.all_reduce(total)
        with torch.no_grad():
            hits = sum((model.module(x).argmax(1) == y).sum().item() for x, y in test)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / world / len(loader):.5f} test {hits}/{len(test.dataset)}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
