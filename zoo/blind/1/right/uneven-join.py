"""Poisson regression on counts. The number of batches does not divide evenly, so some processes run out earlier than others."""
import argparse

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP


def simulate(n, seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, 12)).astype("float32")
    rate = np.exp(0.5 * x[:, 0] - 0.4 * x[:, 1] * x[:, 2] + 0.3 * np.cos(2 * x[:, 3])).clip(0, 8)
    return torch.from_numpy(x), torch.from_numpy(rng.poisson(rate).astype("float32"))


def local_batches(n, size, epoch, rank, world):
    order = np.random.default_rng([epoch, 77]).permutation(n)
    pieces = [order[i:i + size] for i in range(0, n, size)]
    return [torch.from_numpy(p) for p in pieces[rank::world]]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    args = parser.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = simulate(480, 0)
    xt, yt = simulate(301, 1)

    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(12, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    model = DDP(net)
    criterion = nn.PoissonNLLLoss(log_input=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)

    for epoch in range(args.epochs):
        mine = local_batches(len(x), args.size, epoch, rank, world)
        # joined processes no longer count in the average of the gradients
        with Join([model], divide_by_initial_world_size=False):
            for idx in mine:
                optimizer.zero_grad()
                loss = criterion(model(x[idx]).squeeze(1), y[idx])
                loss.backward()
                optimizer.step()
        scheduler.step()

        with torch.no_grad():
            part = slice(rank, None, world)
            dev = nn.functional.poisson_nll_loss(net(xt[part]).squeeze(1), yt[part], reduction="sum")
            total = torch.stack([dev, torch.tensor(float(len(yt[part])))])
        dist.all_reduce(total)
        print(f"rank {rank} epoch {epoch}: {len(mine)} batches, test nll {total[0] / total[1]:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
