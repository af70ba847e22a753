"""Digits MLP with dropout. The job is cut into two legs: the first stops in the middle of an epoch, the second picks up there."""
import argparse
import os
import shutil

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset


class ResumableSampler(Sampler):
    """Batches of indices for this process; `start` counts batches of the running epoch that are done already."""

    def __init__(self, n, batch_size, rank, world, seed):
        self.n, self.bs, self.rank, self.world, self.seed = n, batch_size, rank, world, seed
        self.epoch, self.start = 0, 0

    def __len__(self):
        return self.n // (self.bs * self.world) - self.start

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed * 1000 + self.epoch)
        order = torch.randperm(self.n, generator=g).tolist()
        step = self.bs * self.world
        first = self.start
        for b in range(first, self.n // step):
            yield order[b * step + self.rank:(b + 1) * step:self.world]


class Trainer:
    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        d = load_digits()
        x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
        self.val = x[1200:], y[1200:]
        self.sampler = ResumableSampler(1200, args.batch_size, self.rank, self.world, args.seed)
        self.loader = DataLoader(TensorDataset(x[:1200], y[:1200]), batch_sampler=self.sampler,
                                 generator=torch.Generator().manual_seed(0))
        torch.manual_seed(args.seed)
        net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(args.dropout), nn.Linear(128, 10))
        self.model = DDP(net)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.opt, args.lr, total_steps=args.steps)
        self.step, self.epoch, self.in_epoch = 0, 0, 0
        torch.manual_seed(args.seed + 7919 * (self.rank + 1))

    def save(self, path):
        states = [torch.empty_like(torch.get_rng_state()) for _ in range(self.world)]
        dist.all_gather(states, torch.get_rng_state())
        if self.rank == 0:
            torch.save({"model": self.model.module.state_dict(), "opt": self.opt.state_dict(), "sched": self.sched.state_dict(),
                        "step": self.step, "epoch": self.epoch, "in_epoch": self.in_epoch, "rng": states}, path + ".tmp")
            os.replace(path + ".tmp", path)
        dist.barrier()

    def load(self, path):
        c = torch.load(path, map_location="cpu", weights_only=True)
        self.model.module.load_state_dict(c["model"])
        self.opt.load_state_dict(c["opt"])
        self.sched.load_state_dict(c["sched"])
        self.step, self.epoch, self.in_epoch = c["step"], c["epoch"], c["in_epoch"]
        torch.set_rng_state(c["rng"][self.rank])

    def fit(self, until):
        self.model.train()
        while self.step < until:
            self.sampler.epoch, self.sampler.start = self.epoch, self.in_epoch
            for x, y in self.loader:
                self.opt.zero_grad()
                loss = F.cross_entropy(self.model(x), y)
                loss.backward()
                self.opt.step()
                self.sched.step()
                self.step += 1
                self.in_epoch += 1
                if self.step % 5 == 0 and self.rank == 0:
                    print(f"step {self.step:3d} epoch {self.epoch}+{self.in_epoch:2d} loss {loss.item():.4f}", flush=True)
                if self.step == until:
                    return
            self.epoch, self.in_epoch = self.epoch + 1, 0

    @torch.no_grad()
    def evaluate(self):
        net = self.model.module.eval()
        x, y = (t[self.rank::self.world] for t in self.val)
        counts = torch.tensor([(net(x).argmax(1) == y).sum().item(), len(y)])
        dist.all_reduce(counts)
        return (counts[0] / counts[1]).item()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=30)
    p.add_argument("--lr", type=float, default=4e-3)
    p.add_argument("--dropout", type=float, default=0.2)
    p.add_argument("--steps", type=int, default=45)
    p.add_argument("--stop-at", type=int, default=27)
    p.add_argument("--seed", type=int, default=1)
    args = p.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    out = "runs/midepoch"
    if dist.get_rank() == 0:
        shutil.rmtree(out, ignore_errors=True)
        os.makedirs(out)
    dist.barrier()
    first = Trainer(args)
    first.fit(args.stop_at)
    first.save(f"{out}/last.pt")
    del first
    second = Trainer(args)
    second.load(f"{out}/last.pt")
    second.fit(args.steps)
    acc = second.evaluate()
    if dist.get_rank() == 0:
        print(f"val acc {acc:.4f}")
    dist.destroy_process_group()
