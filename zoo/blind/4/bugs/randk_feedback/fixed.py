"""Momentum SGD that exchanges only a random part of every gradient and carries the rest over."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class RandomKSGD(torch.optim.Optimizer):
    """Each step a fraction of the entries is drawn per tensor; those entries are averaged over the
    processes and applied, everything else stays in a residual for later."""

    def __init__(self, params, lr, fraction=0.25, momentum=0.8, seed=0):
        super().__init__(params, dict(lr=lr, fraction=fraction, momentum=momentum))
        self.world = dist.get_world_size()
        self.draw = torch.Generator().manual_seed(seed)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["residual"] = torch.zeros(p.numel())
                    state["velocity"] = torch.zeros_like(p)
                carried = state["residual"].add_(p.grad.flatten())
                k = max(1, int(group["fraction"] * p.numel()))
                chosen = torch.randperm(p.numel(), generator=self.draw)[:k]
                values = carried[chosen]
                carried[chosen] = 0
                dist.all_reduce(values)
                update = torch.zeros(p.numel())
                update[chosen] = values / self.world
                state["velocity"].mul_(group["momentum"]).add_(update.view_as(p))
                p.add_(state["velocity"], alpha=-group["lr"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, stride=2, padding=1)
        self.mid = nn.Linear(256, 40)
        self.out = nn.Linear(40, 10)

    def forward(self, x):
        x = F.relu(self.conv(x)).flatten(1)
        return self.out(F.relu(self.mid(x)))


def setup(seed):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(seed + dist.get_rank())
    return dist.get_rank(), dist.get_world_size()


def batches(x, y, size, epochs, seed, rank, world):
    g = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=g)
        for i in range(0, len(order) - size + 1, size):
            mine = order[i:i + size].view(world, -1)[rank]
            yield x[mine], y[mine]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=3)
    ap.add_argument("--batch", type=int, default=96)
    ap.add_argument("--lr", type=float, default=0.05)
    ap.add_argument("--fraction", type=float, default=0.25)
    ap.add_argument("--seed", type=int, default=8)
    args = ap.parse_args()
    rank, world = setup(args.seed)

    x, y = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    y = torch.tensor(y)
    net = Net()
    for p in net.parameters():
        dist.broadcast(p.data, 0)
    optim = RandomKSGD(net.parameters(), args.lr, args.fraction, seed=args.seed)

    for step, (bx, by) in enumerate(batches(x[:1500], y[:1500], args.batch, args.epochs, args.seed, rank, world), 1):
        loss = F.cross_entropy(net(bx), by)
        optim.zero_grad()
        loss.backward()
        optim.step()
        if step % 9 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item() / world:.6f}")

    with torch.no_grad():
        hits = (net(x[1500:]).argmax(1) == y[1500:]).float().mean()
    if rank == 0:
        print(f"held-out accuracy {hits.item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
