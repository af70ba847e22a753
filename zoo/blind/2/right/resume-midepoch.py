import os
import sys
import tempfile
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

BATCH = int(os.environ.get("BATCH", 32))
DROPOUT = float(os.environ.get("DROPOUT", 0.2))


class ResumableSampler(Sampler):
    def __init__(self, n, rank, world, batch, seed=0):
        self.n, self.rank, self.world, self.batch, self.seed = n, rank, world, batch, seed
        self.epoch, self.start = 0, 0
        self.steps = n // (batch * world)

    def __iter__(self):
        perm = np.random.RandomState(self.seed + self.epoch).permutation(self.n)
        perm = perm[:self.steps * self.batch * self.world][self.rank::self.world]
        return iter(perm[self.start * self.batch:].tolist())

    def __len__(self):
        return (self.steps - self.start) * self.batch


class Trainer:
    def __init__(self, path):
        self.rank, self.world, self.path = dist.get_rank(), dist.get_world_size(), path
        x, y = load_digits(return_X_y=True)
        x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
        self.val = x[1200:][self.rank::self.world], y[1200:][self.rank::self.world]
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(DROPOUT), nn.Linear(64, 10))
        self.model = DistributedDataParallel(net)
        self.opt = torch.optim.RMSprop(net.parameters(), lr=2e-3, momentum=0.5)
        self.sched = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, factor=0.5, patience=0, threshold=0.2)
        self.sampler = ResumableSampler(1200, self.rank, self.world, BATCH)
        self.loader = DataLoader(TensorDataset(x[:1200], y[:1200]), BATCH, sampler=self.sampler,
                                 generator=torch.Generator().manual_seed(0))
        self.epoch = self.step = 0
        torch.manual_seed(100 + self.rank)

    def save(self, in_epoch):
        rngs = [None] * self.world
        dist.all_gather_object(rngs, torch.get_rng_state())
        if self.rank == 0:
            state = {"model": self.model.module.state_dict(), "opt": self.opt.state_dict(),
                     "sched": self.sched.state_dict(), "epoch": self.epoch, "step": self.step,
                     "in_epoch": in_epoch, "rng": rngs}
            torch.save(state, self.path + ".tmp")
            os.replace(self.path + ".tmp", self.path)
        dist.barrier()

    def maybe_resume(self):
        found = [os.path.exists(self.path) if self.rank == 0 else None]
        dist.broadcast_object_list(found, src=0)
        if not found[0]:
            return
        s = torch.load(self.path, map_location="cpu", weights_only=True)
        self.model.module.load_state_dict(s["model"])
        self.opt.load_state_dict(s["opt"])
        self.sched.load_state_dict(s["sched"])
        self.epoch, self.step, self.sampler.start = s["epoch"], s["step"], s["in_epoch"]
        torch.set_rng_state(s["rng"][self.rank])
        if self.rank == 0:
            print(f"resumed at epoch {self.epoch}, {s['in_epoch']} batches in")

    def validate(self):
        self.model.eval()
        with torch.no_grad():
            out = self.model.module(self.val[0])
            s = torch.stack([F.cross_entropy(out, self.val[1], reduction="sum"),
                             (out.argmax(1) == self.val[1]).sum().float(), torch.tensor(float(len(out)))])
        dist.all_reduce(s)
        return (s[0] / s[2]).item(), (s[1] / s[2]).item()

    def fit(self, epochs, preempt_at=None):
        while self.epoch < epochs:
            self.model.train()
            self.sampler.epoch = self.epoch
            for i, (x, y) in enumerate(self.loader, start=self.sampler.start):
                loss = F.cross_entropy(self.model(x), y)
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.step += 1
                if self.step == preempt_at:
                    return self.save(i + 1)
            self.sampler.start = 0
            loss, acc = self.validate()
            self.sched.step(loss)
            self.epoch += 1
            if self.rank == 0:
                print(f"epoch {self.epoch} step {self.step} val loss {loss:.4f} acc {acc:.4f} lr {self.opt.param_groups[0]['lr']:.5f}")
            self.save(0)


torch.set_num_threads(1)
dist.init_process_group("gloo")
where = [os.path.join(tempfile.mkdtemp(), "last.pt") if dist.get_rank() == 0 else None]
dist.broadcast_object_list(where, src=0)
preempt = int(sys.argv[1]) if len(sys.argv) > 1 else 25
for budget in (preempt, None):
    trainer = Trainer(where[0])
    trainer.maybe_resume()
    trainer.fit(3, preempt_at=budget)
time.sleep(0.3)
dist.destroy_process_group()
