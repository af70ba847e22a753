import argparse
import contextlib
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def parse():
    p = argparse.ArgumentParser(description="digits with windows of several micro-batches")
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--micro", type=int, default=56, help="micro-batch over all ranks")
    p.add_argument("--window", type=int, default=3)
    p.add_argument("--lr", type=float, default=1.5e-3)
    return p.parse_args()


def model_of(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 80), nn.SiLU(), nn.Linear(80, 80), nn.SiLU(), nn.Linear(80, 10))


def epoch_pass(net, opt, loader, window):
    n = len(loader)
    seen = 0.0
    for i, (x, y) in enumerate(loader):
        closing = (i + 1) % window == 0 or i + 1 == n
        length = min(window, n - i // window * window)
        with contextlib.nullcontext() if closing else net.no_sync():
            loss = nn.functional.cross_entropy(net(x), y) / length
            loss.backward()
        seen += loss.item() * length / n
        if closing or i + 1 == n:
            opt.step()
            opt.zero_grad()
    return seen


def main():
    args = parse()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.data / 16.0).float(), torch.tensor(d.target)
    data = TensorDataset(x[:1400], y[:1400])
    sampler = DistributedSampler(data, shuffle=True, seed=8)
    loader = DataLoader(data, batch_size=args.micro // world, sampler=sampler)
    net = DistributedDataParallel(model_of(21))
    opt = torch.optim.AdamW(net.parameters(), lr=args.lr, eps=1e-6)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        mean = torch.tensor(epoch_pass(net, opt, loader, args.window))
        dist.all_reduce(mean)
        net.eval()
        with torch.no_grad():
            hits = (net.module(x[1400:]).argmax(1) == y[1400:]).sum().item()
        net.train()
        if rank == 0:
            print(f"epoch {epoch}: loss {mean.item() / world:.5f}, test {hits}/{len(x) - 1400}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
