"""Digits under DDP with sharded optimizer state. The job is cut at step 17, inside the second epoch, and taken up again."""
import os
import tempfile
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

BATCH, EPOCHS, CUT = 120, 3, 17


class RestSampler(Sampler):
    """This process's batches of an epoch from batch `start` on; the permutation is that of the whole epoch."""

    def __init__(self, n, rank, world):
        self.n, self.rank, self.world, self.epoch, self.start = n, rank, world, 0, 0

    def __iter__(self):
        order = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch)).split(BATCH)
        for block in order[self.start:]:
            yield block[self.rank::self.world].tolist()

    def __len__(self):
        return self.n // BATCH - self.start


def build(seed):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(64, 48), nn.LayerNorm(48), nn.GELU(), nn.Linear(48, 24), nn.GELU(), nn.Linear(24, 10))
    net = DistributedDataParallel(net)
    opt = ZeroRedundancyOptimizer(net.parameters(), optimizer_class=torch.optim.Adam, lr=3e-3, eps=1e-6)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 10))
    return net, opt, sched


def run(net, opt, sched, loader, at, until, rank):
    epoch, inside, step = at
    sampler = loader.batch_sampler
    while epoch < EPOCHS:
        sampler.epoch, sampler.start = epoch, inside
        for x, y in loader:
            loss = nn.functional.cross_entropy(net(x), y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            step += 1
            inside += 1
            if step == until:
                return epoch, inside, step
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"epoch {epoch + 1} step {step} last loss {mean.item():.6f}", flush=True)
        epoch, inside = epoch + 1, 0
    return epoch, inside, step


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    bunch = load_digits()
    x, y = torch.tensor(bunch.data / 16.0, dtype=torch.float32), torch.tensor(bunch.target)
    n = 1440
    loader = DataLoader(TensorDataset(x[:n], y[:n]), batch_sampler=RestSampler(n, rank, world))

    net, opt, sched = build(1)
    at = run(net, opt, sched, loader, (0, 0, 0), CUT, rank)
    opt.consolidate_state_dict(to=0)
    path = [None]
    if rank == 0:
        path[0] = os.path.join(tempfile.mkdtemp(), "job.pt")
        torch.save({"net": net.module.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(), "at": at}, path[0])
        print(f"cut at step {at[2]}, {at[1]} batches into epoch {at[0] + 1}", flush=True)
    dist.broadcast_object_list(path, src=0)

    del net, opt, sched
    net, opt, sched = build(50 + rank)
    state = torch.load(path[0])
    net.module.load_state_dict(state["net"])
    opt.load_state_dict(state["opt"])
    sched.load_state_dict(state["sched"])
    run(net, opt, sched, loader, state["at"], None, rank)

    with torch.no_grad():
        lo, hi = n + rank * (len(x) - n) // world, n + (rank + 1) * (len(x) - n) // world
        right = (net.module(x[lo:hi]).argmax(1) == y[lo:hi]).sum()
    dist.all_reduce(right)
    if rank == 0:
        print(f"accuracy {right.item() / (len(x) - n):.4f}")
        os.remove(path[0])
        os.rmdir(os.path.dirname(path[0]))
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
