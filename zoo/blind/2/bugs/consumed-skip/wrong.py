"""Digits classifier that is stopped in the middle of an epoch and picked up again from its checkpoint."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        d = load_digits()
        ds = TensorDataset(torch.tensor(d.data, dtype=torch.float32)[:1024] / 16, torch.tensor(d.target)[:1024])
        self.sampler = DistributedSampler(ds, shuffle=True, seed=args.seed)
        self.loader = DataLoader(ds, batch_size=args.batch_size // self.world, sampler=self.sampler)
        self.model = DDP(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)))
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, args.max_steps)
        self.epoch = self.step = self.seen_in_epoch = 0

    @property
    def path(self):
        return os.path.join(self.args.out, "state.pt")

    def save(self):
        if self.rank == 0:
            os.makedirs(self.args.out, exist_ok=True)
            torch.save({
                "model": self.model.module.state_dict(), "opt": self.opt.state_dict(), "sched": self.sched.state_dict(),
                "epoch": self.epoch, "step": self.step, "seen_in_epoch": self.seen_in_epoch,
            }, self.path)
        dist.barrier()

    def load(self):
        state = torch.load(self.path, map_location="cpu")
        self.model.module.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.sched.load_state_dict(state["sched"])
        self.epoch, self.step, self.seen_in_epoch = state["epoch"], state["step"], state["seen_in_epoch"]
        dist.barrier()

    def fit(self, until):
        while self.step < until:
            self.sampler.set_epoch(self.epoch)
            skip = self.seen_in_epoch // self.loader.batch_size
            for i, (x, y) in enumerate(self.loader):
                if i < skip:
                    continue
                loss = F.cross_entropy(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.sched.step()
                self.step += 1
                self.seen_in_epoch += len(x) * self.world
                if self.rank == 0 and self.step % 7 == 0:
                    print(f"epoch {self.epoch} step {self.step} loss {loss.item():.4f}", flush=True)
                if self.step == until:
                    return
            self.epoch += 1
            self.seen_in_epoch = 0


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--batch-size", type=int, default=64, help="over all processes")
    ap.add_argument("--max-steps", type=int, default=42)
    ap.add_argument("--stop-at", type=int, default=21)
    ap.add_argument("--seed", type=int, default=6)
    ap.add_argument("--out", default="out")
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    first = Trainer(args)
    first.fit(args.stop_at)
    first.save()
    del first
    again = Trainer(args)
    again.load()
    if again.rank == 0:
        print(f"continue from step {again.step}", flush=True)
    again.fit(args.max_steps)
    dist.barrier()
    dist.destroy_process_group()
