"""LSTM that predicts the next sample of noisy beats (sums of two sines).

Small-memory recipe: every optimizer step accumulates up to `--accum`
micro-batches and DDP only communicates on the last one.  An epoch has seven
micro-batches, so its last window is shorter; gradients are averaged over the
micro-batches that the window really has.
"""
import argparse
import contextlib
import math
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Beats(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.rnn = nn.LSTM(1, hidden, batch_first=True)
        self.out = nn.Linear(hidden, 1)

    def forward(self, wave):
        h, _ = self.rnn(wave.unsqueeze(-1))
        return self.out(h).squeeze(-1)


def make_waves(n, length, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.arange(length).float()
    f = 0.15 + 0.35 * torch.rand(n, 2, generator=g)
    phase = 2 * math.pi * torch.rand(n, 2, generator=g)
    clean = torch.sin(f[:, :1] * t + phase[:, :1]) + 0.5 * torch.sin(f[:, 1:] * t + phase[:, 1:])
    return clean + 0.05 * torch.randn(n, length, generator=g)


def micro_batches(data, epoch, size, rank, world):
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(1000 + epoch))
    parts = order.split(size)
    return [data[p[rank::world]] for p in parts]


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=10)
    ap.add_argument("--accum", type=int, default=3)
    ap.add_argument("--micro", type=int, default=16, help="rows of a micro-batch, all processes together")
    ap.add_argument("--lr", type=float, default=0.25)
    return ap.parse_args()


def main():
    args = parse()
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29622")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(3)
    model = DistributedDataParallel(Beats())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.8)
    train, valid = make_waves(112, 28, seed=1), make_waves(64, 28, seed=2)

    for epoch in range(args.epochs):
        batches = micro_batches(train, epoch, args.micro, rank, world)
        total = 0.0
        for i, wave in enumerate(batches):
            first = i - i % args.accum
            window = min(args.accum, len(batches) - first)
            boundary = (i + 1) % args.accum == 0
            last = i + 1 == len(batches)

            ctx = contextlib.nullcontext() if boundary or last else model.no_sync()
            with ctx:
                pred = model(wave[:, :-1])
                loss = (pred - wave[:, 1:]).pow(2).mean()
                (loss / window).backward()
            total += loss.item()

            if boundary or last:
                opt.step()
                opt.zero_grad()

        with torch.no_grad():
            mine = valid[rank::world]
            err = (model.module(mine[:, :-1]) - mine[:, 1:]).pow(2).sum()
            dist.all_reduce(err)
        report = torch.tensor(total / len(batches))
        dist.all_reduce(report)
        if rank == 0 and epoch % 2 == 1:
            print(f"epoch {epoch + 1:2d}: train mse {report.item() / world:.5f}, "
                  f"valid mse {err.item() / valid[:, 1:].numel():.5f}", flush=True)

    if rank == 0:
        print(f"done, weight norm {sum(p.norm() ** 2 for p in model.parameters()).sqrt().item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
