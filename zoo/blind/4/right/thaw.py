"""Transfer: a network learnt on digits 0-4 is adapted to 5-9, layers thawed from the top."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=50)
parser.add_argument("--steps", type=int, default=14, help="per phase")
parser.add_argument("--lr", type=float, default=0.08)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.low = nn.Sequential(nn.Linear(64, 48), nn.ReLU())
        self.high = nn.Sequential(nn.Linear(48, 32), nn.ReLU())
        self.head = nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.high(self.low(x)))


class Stream:
    def __init__(self, x, y, batch, seed):
        self.x, self.y, self.batch = x, y, batch
        self.gen = torch.Generator().manual_seed(seed)

    def next(self):
        ids = torch.randint(0, len(self.x), (self.batch,), generator=self.gen)
        ids = ids[dist.get_rank()::dist.get_world_size()]
        return self.x[ids], self.y[ids]


def phase(name, ddp, opt, stream, steps):
    total = torch.zeros(1)
    for _ in range(steps):
        x, y = stream.next()
        loss = F.cross_entropy(ddp(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        total += loss.detach()
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"{name}: mean loss {total.item() / steps / dist.get_world_size():.6f}", flush=True)


def main():
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    old = Stream(x[y < 5], y[y < 5], args.batch, 1)
    new = Stream(x[y >= 5], y[y >= 5] - 5, args.batch, 2)

    torch.manual_seed(50)
    net = Net()
    phase("source", DDP(net), torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9), old, args.steps)

    for p in net.parameters():
        p.requires_grad_(False)
    nn.init.zeros_(net.head.weight)
    opt = None
    for name in ("head", "high", "low"):
        part = getattr(net, name)
        for p in part.parameters():
            p.requires_grad_(True)
        if opt is None:
            opt = torch.optim.SGD(part.parameters(), lr=args.lr, momentum=0.9)
        else:
            opt.add_param_group({"params": list(part.parameters()), "lr": opt.param_groups[-1]["lr"] / 2})
        phase(f"with {name}", DDP(net), opt, new, args.steps)
    with torch.no_grad():
        accuracy = (net(new.x).argmax(1) == new.y).float().mean().item()
    if dist.get_rank() == 0:
        print(f"accuracy on the new classes {accuracy:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
