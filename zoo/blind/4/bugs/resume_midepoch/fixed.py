"""Digits classifier that is stopped in the middle of an epoch and taken up again from its checkpoint."""
import argparse
import itertools
import os
import shutil
import tempfile
import time
from dataclasses import dataclass, asdict

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


@dataclass
class Progress:
    epoch: int = 0
    step: int = 0
    samples_in_epoch: int = 0


class Run:
    def __init__(self, args, data):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.micro = args.global_batch // self.world
        self.sampler = DistributedSampler(data, shuffle=True, seed=args.seed, drop_last=True)
        self.loader = DataLoader(data, batch_size=self.micro, sampler=self.sampler, drop_last=True)
        torch.manual_seed(args.seed)
        net = nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 10))
        self.model = DDP(net)
        self.optim = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
        self.progress = Progress()

    def save(self, path):
        if self.rank == 0:
            torch.save({"model": self.model.module.state_dict(),
                        "optim": self.optim.state_dict(),
                        "progress": asdict(self.progress)}, path)
        dist.barrier()

    def load(self, path):
        blob = torch.load(path, map_location="cpu")
        self.model.module.load_state_dict(blob["model"])
        self.optim.load_state_dict(blob["optim"])
        self.progress = Progress(**blob["progress"])

    def batches(self):
        """The rest of the current epoch."""
        self.sampler.set_epoch(self.progress.epoch)
        done = self.progress.samples_in_epoch // (self.micro * self.world)
        return itertools.islice(iter(self.loader), done, None)

    def train(self, until):
        loss_fn = nn.CrossEntropyLoss()
        p = self.progress
        while p.step < until:
            for x, y in self.batches():
                loss = loss_fn(self.model(x), y)
                self.optim.zero_grad(set_to_none=True)
                loss.backward()
                self.optim.step()
                p.step += 1
                p.samples_in_epoch += self.args.global_batch
                if p.step == until:
                    return
                if p.step % 8 == 0:
                    self.report(loss)
            p.epoch, p.samples_in_epoch = p.epoch + 1, 0

    def report(self, loss):
        value = loss.detach().clone()
        dist.all_reduce(value)
        if self.rank == 0:
            p = self.progress
            print(f"step {p.step:3d} epoch {p.epoch} loss {value.item() / self.world:.6f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=44)
    parser.add_argument("--stop-at", type=int, default=9)
    parser.add_argument("--global-batch", type=int, default=64)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    x, y = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y))
    where = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(where)
    path = os.path.join(where[0], "last.pt")

    first = Run(args, data)
    first.train(args.stop_at)
    first.save(path)
    del first
    second = Run(args, data)
    second.load(path)
    second.train(args.steps)
    if dist.get_rank() == 0:
        p = second.progress
        norm = sum(w.double().pow(2).sum() for w in second.model.parameters()).sqrt()
        print(f"finished: {p.step} steps, epoch {p.epoch}, {p.samples_in_epoch} samples into it, norm {norm:.7f}")
        shutil.rmtree(where[0])
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
