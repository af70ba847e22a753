"""Fine-tuning in two stages: head only, then the upper part of the trunk too.  Norm statistics come from one pass over the data."""
import time
from argparse import ArgumentParser

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.low = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        self.high = nn.Sequential(nn.Conv2d(16, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.MaxPool2d(2))
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(96, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, x):
        return self.head(self.high(self.low(x)))

    def train(self, mode=True):
        super().train(mode)
        for m in self.modules():
            if isinstance(m, nn.BatchNorm2d):
                m.eval()
        return self


@torch.no_grad()
def collect_statistics(net, x):
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d)]
    for m in norms:
        m.reset_running_stats()
        m.momentum = None
        nn.Module.train(m, True)
    for part in x.split(256):
        net(part)
    net.train()


def epoch_of(ddp, opt, x, y, batch, seed):
    rank, world = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    total = 0.0
    whole = len(order) // batch
    for k in range(whole):
        mine = order[k * batch + rank:(k + 1) * batch:world]
        loss = nn.functional.cross_entropy(ddp(x[mine]), y[mine])
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.item() / whole
    return total


def main():
    p = ArgumentParser()
    p.add_argument("--batch", type=int, default=80)
    p.add_argument("--head-epochs", type=int, default=1)
    p.add_argument("--full-epochs", type=int, default=2)
    a = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lead = dist.get_rank() == 0

    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1, torch.tensor(y)
    x, y, xe, ye = x[:1400], y[:1400], x[1400:], y[1400:]
    torch.manual_seed(21)
    net = Net()
    collect_statistics(net, x)

    net.low.requires_grad_(False)
    net.high.requires_grad_(False)
    ddp = DDP(net)
    opt = torch.optim.Adam(net.head.parameters(), lr=4e-3)
    for e in range(a.head_epochs):
        loss = epoch_of(ddp, opt, x, y, a.batch, e)
        if lead:
            print(f"head {e}: own loss {loss:.4f}")

    net.high.requires_grad_(True)
    del ddp
    ddp = DDP(net)
    opt.add_param_group({"params": list(net.high.parameters()), "lr": 1e-3})
    for e in range(a.full_epochs):
        loss = epoch_of(ddp, opt, x, y, a.batch, 100 + e)
        if lead:
            print(f"high+head {e}: own loss {loss:.4f}")

    net.eval()
    with torch.no_grad():
        acc = (net(xe).argmax(1) == ye).double().mean().item()
    if lead:
        print(f"accuracy on the {len(xe)} held-out images: {acc:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


main()
