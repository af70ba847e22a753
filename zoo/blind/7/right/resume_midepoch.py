"""Friedman regression that stops inside an epoch, saves everything and goes on in a fresh trainer."""
import os
import random
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_friedman1
from torch.nn.parallel import DistributedDataParallel as DDP


class ResumableSampler:
    def __init__(self, n, batch, rank, world):
        self.n, self.batch, self.rank, self.world = n, batch, rank, world
        self.epoch, self.position = 0, 0

    def __iter__(self):
        perm = torch.randperm(self.n, generator=torch.Generator().manual_seed(self.epoch + 17))
        while self.position + self.batch <= self.n:
            part = perm[self.position:self.position + self.batch]
            self.position += self.batch
            yield part.chunk(self.world)[self.rank]
        self.epoch, self.position = self.epoch + 1, 0

    def state_dict(self):
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, s):
        self.epoch, self.position = s["epoch"], s["position"]


class Trainer:
    def __init__(self, x, y, rank, world):
        self.x, self.y, self.rank, self.world = x, y, rank, world
        torch.manual_seed(6)
        self.net = nn.Sequential(nn.Linear(10, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1))
        self.ddp = DDP(self.net)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=5e-3)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, 60)
        self.sampler = ResumableSampler(len(x), 40, rank, world)
        self.noise = torch.Generator().manual_seed(100)
        random.seed(8)
        self.step = 0

    def run(self, until):
        while self.step < until:
            for ids in self.sampler:
                noise = 0.05 * torch.randn(len(self.x), 10, generator=self.noise)
                flip = -1.0 if random.random() < 0.3 else 1.0
                loss = (self.ddp(self.x[ids] + flip * noise[ids]) - self.y[ids]).square().mean()
                self.opt.zero_grad()
                loss.backward()
                self.opt.step()
                self.sched.step()
                self.step += 1
                if self.step % 10 == 0:
                    v = loss.detach().clone()
                    dist.all_reduce(v)
                    if self.rank == 0:
                        print(f"step {self.step} loss {v.item() / self.world:.5f} lr {self.sched.get_last_lr()[0]:.6f}")
                if self.step == until:
                    break

    def save(self, path):
        state = {k: getattr(self, k).state_dict() for k in ("net", "opt", "sched", "sampler")}
        state |= {"step": self.step, "noise": self.noise.get_state(), "python": random.getstate()}
        if self.rank == 0:
            torch.save(state, path)
        dist.barrier()

    def load(self, path):
        state = torch.load(path, weights_only=False)
        for k in ("net", "opt", "sched", "sampler"):
            getattr(self, k).load_state_dict(state[k])
        self.step = state["step"]
        self.noise.set_state(state["noise"])
        random.setstate(state["python"])


if __name__ == "__main__":
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29710").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_friedman1(800, noise=0.3, random_state=0)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)[:, None] / 5 - 3
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "trainer.pt")

    first = Trainer(x, y, rank, world)
    first.run(27)
    first.save(path)
    del first
    second = Trainer(x, y, rank, world)
    second.load(path)
    second.run(60)
    dist.barrier()
    dist.destroy_process_group()
