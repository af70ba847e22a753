"""Image classifier whose run is stopped in the middle of an epoch and taken up again by a new trainer."""
import argparse
import os
import tempfile
import time
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

warnings.filterwarnings("ignore")


class Trainer:
    def __init__(self, args, data, seed):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed + self.rank)
        self.model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 32), nn.ReLU(),
                                       nn.Linear(32, 10)))
        self.opt = ZeroRedundancyOptimizer(self.model.parameters(), optimizer_class=torch.optim.Adam, lr=args.lr,
                                           weight_decay=1e-4)
        self.sched = torch.optim.lr_scheduler.StepLR(self.opt, step_size=8, gamma=0.8)
        self.sampler = DistributedSampler(data, seed=2, drop_last=True)
        self.loader = DataLoader(data, batch_size=args.batch // self.world, sampler=self.sampler, drop_last=True)
        self.epoch = self.done = self.steps = 0

    def fit(self, until):
        while self.steps < until:
            self.sampler.set_epoch(self.epoch)
            for i, (x, y) in enumerate(self.loader):
                if i < self.done:
                    continue
                if self.steps == until:
                    return
                loss = F.cross_entropy(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.sched.step()
                self.steps += 1
                self.done = i + 1
                if self.steps % 10 == 0:
                    mean = loss.detach().clone()
                    dist.all_reduce(mean)
                    if self.rank == 0:
                        print(f"{self.steps} epoch {self.epoch} loss {mean / self.world:.6f} "
                              f"lr {self.sched.get_last_lr()[0]:.6f}", flush=True)
            self.epoch, self.done = self.epoch + 1, 0

    def save(self, path):
        self.opt.consolidate_state_dict(to=0)
        if self.rank == 0:
            torch.save({"model": self.model.module.state_dict(), "opt": self.opt.state_dict(),
                        "sched": self.sched.state_dict(), "at": (self.epoch, self.done, self.steps)}, path)
        dist.barrier()

    def load(self, path):
        state = torch.load(path)
        self.model.module.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.sched.load_state_dict(state["sched"])
        self.epoch, self.done, self.steps = state["at"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=50)
    p.add_argument("--stop", type=int, default=27)
    p.add_argument("--batch", type=int, default=80)
    p.add_argument("--lr", type=float, default=5e-3)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x[:1600], dtype=torch.float32) / 16, torch.tensor(y[:1600]))
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "state.pt")

    first = Trainer(args, data, seed=10)
    first.fit(args.stop)
    first.save(path)
    del first
    second = Trainer(args, data, seed=500)
    second.load(path)
    second.fit(args.steps)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
