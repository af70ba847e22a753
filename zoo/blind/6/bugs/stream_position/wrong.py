"""Training on an endless stream of rows, interrupted half way: everything is rebuilt from the checkpoint."""
import argparse
import itertools
import os
import shutil
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset


def records():
    """One unending sequence of (features, target), the same wherever it is read."""
    weight = np.random.default_rng(0).normal(size=(16, 3))
    for block in itertools.count():
        rng = np.random.default_rng(1000 + block)
        x = rng.normal(size=(256, 16))
        y = np.tanh(x @ weight) + 0.1 * rng.normal(size=(256, 3))
        for i in range(256):
            yield x[i].astype(np.float32), y[i].astype(np.float32)


class RankStream(IterableDataset):
    def __init__(self, rank, world, skip=0):
        self.rank, self.world, self.skip = rank, world, skip

    def __iter__(self):
        mine = itertools.islice(records(), self.rank, None, self.world)
        return itertools.islice(mine, self.skip, None)


class Job:
    def __init__(self, args, folder):
        self.args, self.path = args, os.path.join(folder, "state.pt")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        net = nn.Sequential(nn.Linear(16, 48), nn.Tanh(), nn.Linear(48, 24), nn.Tanh(), nn.Linear(24, 3))
        self.opt = torch.optim.Adam(net.parameters(), lr=args.lr)
        self.step, self.consumed = 0, 0
        if os.path.exists(self.path):
            state = torch.load(self.path)
            net.load_state_dict(state["net"])
            self.opt.load_state_dict(state["opt"])
            self.step, self.consumed = state["step"], state["consumed"]
        self.net = DDP(net)
        stream = RankStream(self.rank, self.world, skip=self.consumed)
        self.batches = iter(DataLoader(stream, batch_size=args.batch // self.world))

    def save(self):
        if self.rank == 0:
            torch.save({"net": self.net.module.state_dict(), "opt": self.opt.state_dict(),
                        "step": self.step, "consumed": self.consumed}, self.path)
        dist.barrier()

    def run(self, until):
        while self.step < until:
            x, y = next(self.batches)
            loss = nn.functional.mse_loss(self.net(x), y)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.step += 1
            self.consumed += len(x) * self.world
            if self.step % 8 == 0:
                mean = loss.detach() / self.world
                dist.all_reduce(mean)
                if self.rank == 0:
                    print(f"step {self.step} after {self.consumed} rows: {mean.item():.5f}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=3e-3)
    ap.add_argument("--seed", type=int, default=6)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    job = Job(args, folder[0])
    job.run(args.steps // 2)
    job.save()
    job = Job(args, folder[0])
    job.run(args.steps)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder[0])
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
