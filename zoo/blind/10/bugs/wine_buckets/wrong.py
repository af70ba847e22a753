"""Wine, gradients averaged in a few flat buckets while the next ones are being packed."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_wine

BATCH, STEPS = 48, 120


class BucketAverage:
    def __init__(self, params, limit=6000):
        self.world = dist.get_world_size()
        self.buckets, size = [[]], 0
        for p in reversed(list(params)):
            if size + p.numel() > limit and self.buckets[-1]:
                self.buckets.append([])
                size = 0
            self.buckets[-1].append(p)
            size += p.numel()

    @torch.no_grad()
    def __call__(self):
        pending = []
        for bucket in self.buckets:
            flat = torch.cat([p.grad.reshape(-1) for p in bucket]).div_(self.world)
            work = dist.all_reduce(flat, async_op=True)
            pending.append((work, flat, bucket))
        for work, flat, bucket in pending:
            start = 0
            for p in bucket:
                p.grad.copy_(flat[start : start + p.numel()].view_as(p))
                start += p.numel()
            work.wait()


def net():
    torch.manual_seed(4)
    return torch.nn.Sequential(
        torch.nn.Linear(13, 96), torch.nn.ReLU(),
        torch.nn.Linear(96, 96), torch.nn.ReLU(),
        torch.nn.Linear(96, 96), torch.nn.ReLU(),
        torch.nn.Linear(96, 3),
    )


def main():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29707")
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    x, y = load_wine(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    y = torch.tensor(y)
    model = net()
    average = BucketAverage(model.parameters())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    g = torch.Generator().manual_seed(31)

    for step in range(1, STEPS + 1):
        rows = torch.randperm(len(x), generator=g)[:BATCH].chunk(world)[rank]
        loss = F.cross_entropy(model(x[rows]), y[rows])
        opt.zero_grad()
        loss.backward()
        average()
        opt.step()
        if step % 30 == 0:
            with torch.no_grad():
                full = F.cross_entropy(model(x), y)
            if rank == 0:
                print(f"step {step}: loss on all rows {full.item():.6f}", flush=True)

    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
