import argparse
import itertools
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class SensorStream(IterableDataset):
    """Endless records; record i is the same no matter who reads it. Readers = processes x loader workers."""

    def __init__(self, rank, world, start=0, dim=12):
        self.rank, self.world, self.start, self.dim = rank, world, start, dim
        g = torch.Generator().manual_seed(99)
        self.mix = torch.randn(dim, 3, generator=g)

    def record(self, i):
        g = torch.Generator().manual_seed(500_000 + i)
        x = torch.randn(self.dim, generator=g)
        h = x @ self.mix
        y = torch.sin(h[0]) + 0.3 * h[1] * h[2].tanh() + 0.1 * torch.randn((), generator=g)
        return i, x, y

    def __iter__(self):
        info = get_worker_info()
        wid, nw = (info.id, info.num_workers) if info else (0, 1)
        reader, readers = self.rank * nw + wid, self.world * nw
        for i in itertools.count(self.start + reader, readers):
            yield self.record(i)


class Net(nn.Module):
    def __init__(self, dim=12, width=64):
        super().__init__()
        self.a = nn.Linear(dim, width)
        self.b = nn.Linear(width, width)
        self.c = nn.Linear(width, 1)
        self.ln = nn.LayerNorm(width)

    def forward(self, x):
        h = F.silu(self.a(x))
        return self.c(self.ln(h + F.silu(self.b(h)))).squeeze(-1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--budget", type=int, default=2560, help="records to train on, over all processes")
    ap.add_argument("--batch-size", type=int, default=32)
    ap.add_argument("--workers", type=int, default=1)
    ap.add_argument("--lr", type=float, default=6e-3)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(77)
    model = DDP(Net())
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-3)
    loader = DataLoader(SensorStream(rank, world), batch_size=args.batch_size, num_workers=args.workers)
    # held-out records lie far beyond the budget and are read by stride
    valid = SensorStream(rank, world, start=10_000_000)

    seen, log_at, highest = 0, 640, 0
    for ids, x, y in loader:
        frac = seen / args.budget
        for g in opt.param_groups:
            g["lr"] = args.lr * min(1.0, frac / 0.1 + 0.05) * (1.0 - frac)
        loss = F.smooth_l1_loss(model(x), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        seen += len(ids) * world
        highest = max(highest, int(ids.max()))
        if seen >= log_at:
            avg = loss.detach().clone()
            dist.all_reduce(avg)
            if rank == 0:
                print(f"{seen} records, loss {avg.item() / world:.4f}, lr {opt.param_groups[0]['lr']:.5f}")
            log_at += 640
        if seen >= args.budget:
            break

    count = 300 // world
    with torch.no_grad():
        rows = list(itertools.islice(iter(valid), count))
        x, y = torch.stack([r[1] for r in rows]), torch.stack([r[2] for r in rows])
        se = torch.stack([(model.module(x) - y).pow(2).sum(), torch.tensor(float(count))])
    dist.all_reduce(se)
    if rank == 0:
        print(f"valid mse {se[0] / se[1]:.5f} on {int(se[1])} records, highest id read here {highest}")
        torch.save({"model": model.module.state_dict(), "opt": opt.state_dict(), "seen": seen}, "/tmp/stream_iterable.pt")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
