"""Which module does a line of Python come from? Stream of hashed lines, read by worker processes."""
import argparse
import os
import random
import time
import zlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

MODULES = ["argparse", "tarfile", "typing", "turtle"]
BUCKETS = 256


class Lines(IterableDataset):
    def __init__(self, batch, batches, rank, world):
        self.batch, self.batches, self.rank, self.world = batch, batches, rank, world
        self.rows = []
        for label, name in enumerate(MODULES):
            with open(os.path.join(os.path.dirname(os.__file__), name + ".py"), encoding="utf-8") as f:
                self.rows += [(line.split(), label) for line in f if len(line.split()) > 2]

    @staticmethod
    def features(rows):
        x = torch.zeros(len(rows), BUCKETS)
        for i, (words, _) in enumerate(rows):
            for w in words:
                x[i, zlib.crc32(w.encode()) % BUCKETS] += 1
        return x, torch.tensor([label for _, label in rows])

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        for number in range(worker, self.batches, workers):
            rows = random.Random(number).sample(self.rows, self.batch)
            yield self.features(rows[self.rank * self.batch // self.world:(self.rank + 1) * self.batch // self.world])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--steps", type=int, default=31)
    ap.add_argument("--workers", type=int, default=2)
    ap.add_argument("--lr", type=float, default=0.3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    net = DDP(nn.Sequential(nn.Linear(BUCKETS, 32), nn.ReLU(), nn.Linear(32, len(MODULES))))
    opt = torch.optim.Adagrad(net.parameters(), lr=args.lr * 0.1)
    loader = DataLoader(Lines(args.batch, args.steps, rank, world), batch_size=None, num_workers=args.workers)
    recent = torch.zeros(3)
    for step, (x, y) in enumerate(loader, 1):
        out = net(x)
        loss = F.cross_entropy(out, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        recent += torch.stack([loss.detach() * len(y), (out.argmax(1) == y).sum().float(), torch.tensor(float(len(y)))])
        if step % 10 == 0:
            dist.all_reduce(recent)
            if rank == 0:
                print(f"{step} loss {recent[0] / recent[2]:.6f} accuracy {recent[1] / recent[2]:.4f}", flush=True)
            recent.zero_()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
