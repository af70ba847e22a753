"""Regression on a synthetic table with ZeroRedundancyOptimizer; the job is interrupted in mid-epoch and taken up again."""
import argparse
import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=44)
parser.add_argument("--interrupt", type=int, default=19)
parser.add_argument("--global-batch", type=int, default=64)
parser.add_argument("--peak-lr", type=float, default=1e-2)
args = parser.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()


def table(rows=1000, columns=20):
    g = torch.Generator().manual_seed(99)
    x = torch.randn(rows, columns, generator=g)
    w = torch.randn(columns, 6, generator=g)
    y = torch.sin(x @ w[:, :3] / 3).sum(1) + torch.relu(x @ w[:, 3:]).mean(1) + 0.1 * torch.randn(rows, generator=g)
    return TensorDataset(x, y)


class StepSampler(Sampler):
    """Endless list of batches; batch number s is a function of s only, so that any s can be the first one."""

    def __init__(self, n, first, last):
        self.n, self.first, self.last = n, first, last
        self.per_epoch = n // args.global_batch

    def __iter__(self):
        for s in range(self.first, self.last):
            epoch, k = divmod(s, self.per_epoch)
            order = torch.randperm(self.n, generator=torch.Generator().manual_seed(500 + epoch))
            batch = order[k * args.global_batch:(k + 1) * args.global_batch]
            yield batch.chunk(WORLD)[RANK].tolist()

    def __len__(self):
        return self.last - self.first


def build(snapshot=None):
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(20, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1))
    if snapshot:
        net.load_state_dict(snapshot["net"])
    ddp = DistributedDataParallel(net)
    opt = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.AdamW, lr=args.peak_lr, weight_decay=0.02)
    if snapshot:
        opt.load_state_dict(snapshot["opt"])
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / 8, (args.steps - s) / (args.steps - 8)))
    if snapshot:
        sched.load_state_dict(snapshot["sched"])
        for group, lr in zip(opt.param_groups, sched.get_last_lr()):
            group["lr"] = lr
    return ddp, opt, sched


def train(ddp, opt, sched, data, first, last):
    loader = DataLoader(data, batch_sampler=StepSampler(len(data), first, last))
    running = 0.0
    for x, y in loader:
        loss = nn.functional.huber_loss(ddp(x).squeeze(1), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        sched.step()
        running += loss.item()
    mean = torch.tensor(running / len(loader))
    dist.all_reduce(mean)
    if RANK == 0:
        print(f"steps {first}..{last - 1}: loss {mean.item() / WORLD:.5f}, next rate {sched.get_last_lr()[0]:.6f}")


data = table()
where = [os.path.join(tempfile.mkdtemp(), "snap.pt") if RANK == 0 else ""]
dist.broadcast_object_list(where)

job = build()
train(*job, data, 0, args.interrupt)
job[1].consolidate_state_dict(to=0)
if RANK == 0:
    torch.save({"net": job[0].module.state_dict(), "opt": job[1].state_dict(), "sched": job[2].state_dict()}, where[0])
dist.barrier()
del job

job = build(torch.load(where[0], weights_only=False))
train(*job, data, args.interrupt, args.steps)
time.sleep(0.3)
dist.destroy_process_group()
