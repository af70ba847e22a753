"""Digits with a consistency term: the second view goes through the inner module."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 10, 3), nn.ReLU(), nn.Conv2d(10, 16, 3, stride=2), nn.ReLU(),
                                      nn.Flatten())
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.features(x))


def moved(x, shift):
    """Each picture shifted by its own number of columns."""
    columns = (torch.arange(8)[None, :] + shift[:, None]) % 8
    return x.gather(3, columns[:, None, None, :].expand_as(x))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--weight", type=float, default=0.5)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x = torch.tensor(d.images / 16, dtype=torch.float32).unsqueeze(1)
    y = torch.tensor(d.target)
    torch.manual_seed(101)
    model = DDP(Net())
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    g = torch.Generator().manual_seed(1)
    for step in range(args.steps):
        rows = torch.randint(1500, (args.batch,), generator=g)[rank::world]
        shift = torch.randint(0, 3, (args.batch,), generator=g)[rank::world]
        first = model(x[rows])
        second = model.module(moved(x[rows], shift))
        agreement = F.kl_div(second.log_softmax(1), first.log_softmax(1), log_target=True, reduction="batchmean")
        loss = F.cross_entropy(first, y[rows]) + args.weight * agreement
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 9:
            with torch.no_grad():
                hits = (model.module(x[1500:]).argmax(1) == y[1500:]).float().mean()
            if rank == 0:
                print(f"{step + 1}: accuracy {hits.item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
