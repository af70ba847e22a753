"""Flat-parameter sharding with a running average of the weights used for evaluation."""
import argparse
import contextlib
import time
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

warnings.filterwarnings("ignore")


class Stage(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv = nn.Conv2d(cin, cout, 3, padding=1)
        self.norm = nn.GroupNorm(4, cout)

    def forward(self, x):
        return F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)


def build():
    return nn.Sequential(Stage(1, 16), Stage(16, 32), nn.Flatten(), nn.Linear(128, 10))


class RunningAverage:
    def __init__(self, module, decay):
        self.params = list(module.parameters())
        self.decay = decay
        self.mean = [p.detach().clone() for p in self.params]

    def update(self):
        with torch.no_grad():
            for m, p in zip(self.mean, self.params):
                m.lerp_(p, 1 - self.decay)

    @contextlib.contextmanager
    def swapped_in(self):
        kept = [p.detach().clone() for p in self.params]
        with torch.no_grad():
            for p, m in zip(self.params, self.mean):
                p.copy_(m)
        yield
        with torch.no_grad():
            for p, k in zip(self.params, kept):
                p.copy_(k)


@torch.no_grad()
def accuracy(model, x, y, rank, world):
    model.eval()
    mine = range(rank, len(x), world)
    hits = (model(x[mine.start::world]).argmax(1) == y[mine.start::world]).sum()
    count = torch.tensor([hits.item(), len(mine)])
    dist.all_reduce(count)
    model.train()
    return count[0].item(), count[1].item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch", type=int, default=70)
    ap.add_argument("--decay", type=float, default=0.9)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    model = FSDP(build(), auto_wrap_policy=ModuleWrapPolicy({Stage, nn.Linear}), device_id=torch.device("cpu"))
    ema = RunningAverage(model, args.decay)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = load_digits(return_X_y=True)
    x = torch.from_numpy((x / 16).astype(np.float32)).view(-1, 1, 8, 8)
    y = torch.from_numpy(y)
    order = np.random.RandomState(4)
    for epoch in range(args.epochs):
        perm = order.permutation(1400)
        for lo in range(0, 1400, args.batch):
            ids = perm[lo:lo + args.batch][rank::world]
            loss = F.cross_entropy(model(x[ids]), y[ids])
            opt.zero_grad()
            loss.backward()
            model.clip_grad_norm_(2.0)
            opt.step()
            ema.update()
        now = accuracy(model, x[1400:], y[1400:], rank, world)
        with ema.swapped_in():
            mean = accuracy(model, x[1400:], y[1400:], rank, world)
        if rank == 0:
            print(f"epoch {epoch}: weights {now[0]}/{now[1]}, averaged {mean[0]}/{mean[1]}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
