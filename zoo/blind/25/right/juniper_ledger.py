"""Regression on a synthetic garden survey with ZeRO and a planned interruption.

The job stops after `STOP_AT` steps, in the middle of an epoch, and is built again from one file that
worker 0 wrote: weights, consolidated optimizer state, the scheduler and the ledger of rows consumed.
"""
import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

ROWS, BATCH, EPOCHS, STOP_AT = 480, 48, 4, 17


class Ledger:
    """Which rows come next; the same on every worker, cut into equal parts when rows are handed out."""

    def __init__(self, seed):
        self.seed, self.epoch, self.cursor = seed, 0, 0

    def order(self):
        return torch.randperm(ROWS, generator=torch.Generator().manual_seed(self.seed + self.epoch))

    def take(self, rank, world):
        ids = self.order()[self.cursor:self.cursor + BATCH]
        self.cursor += BATCH
        if self.cursor >= ROWS:
            self.epoch, self.cursor = self.epoch + 1, 0
        return ids[rank::world]

    def state(self):
        return {"seed": self.seed, "epoch": self.epoch, "cursor": self.cursor}

    def load(self, s):
        self.seed, self.epoch, self.cursor = s["seed"], s["epoch"], s["cursor"]


def garden():
    g = torch.Generator().manual_seed(40)
    x = torch.randn(ROWS, 9, generator=g)
    y = torch.sin(x[:, 0] * 2) + x[:, 1] * x[:, 2] - x[:, 3:].abs().mean(1)
    return x, y + 0.05 * torch.randn(ROWS, generator=g)


def build():
    net = DDP(nn.Sequential(nn.Linear(9, 40), nn.SiLU(), nn.Linear(40, 40), nn.SiLU(), nn.Linear(40, 1)))
    opt = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=5e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 1.2e-2, total_steps=EPOCHS * ROWS // BATCH,
                                                cycle_momentum=False)
    return net, opt, sched


def jitter(ids, epoch):
    """Measurement noise that belongs to a row and an epoch."""
    rows = [torch.randn(9, generator=torch.Generator().manual_seed(int(i) * 101 + epoch)) for i in ids]
    return 0.03 * torch.stack(rows)


def train(net, opt, sched, ledger, data, until, done):
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = data
    while done < until:
        epoch = ledger.epoch
        ids = ledger.take(rank, world)
        loss = nn.functional.mse_loss(net(x[ids] + jitter(ids, epoch)).squeeze(1), y[ids])
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        done += 1
        if done % 10 == 0:
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {done} epoch {epoch} mse {shown.item():.6f}", flush=True)
    return done


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank = dist.get_rank()
    data = garden()
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    path = os.path.join(folder[0], "garden.pt")

    torch.manual_seed(17)
    net, opt, sched = build()
    ledger = Ledger(seed=900)
    done = train(net, opt, sched, ledger, data, STOP_AT, 0)

    opt.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save({"net": net.module.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(),
                    "ledger": ledger.state(), "done": done}, path)
        print(f"interrupted at step {done}, ledger {ledger.state()}", flush=True)
    dist.barrier()
    del net, opt, sched, ledger

    torch.manual_seed(555)
    net, opt, sched = build()
    saved = torch.load(path, weights_only=False)
    net.module.load_state_dict(saved["net"])
    opt.load_state_dict(saved["opt"])
    sched.load_state_dict(saved["sched"])
    ledger = Ledger(seed=0)
    ledger.load(saved["ledger"])
    train(net, opt, sched, ledger, data, EPOCHS * ROWS // BATCH, saved["done"])

    with torch.no_grad():
        x, y = data
        sse = (net.module(x[rank::dist.get_world_size()]).squeeze(1) - y[rank::dist.get_world_size()]).square().sum()
    dist.all_reduce(sse)
    if rank == 0:
        print(f"rmse {(sse.item() / ROWS) ** 0.5:.6f}")
        shutil.rmtree(folder[0])
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
