"""Denoising autoencoder on 8x8 digit images. Every rank keeps Adam moments for its own parameters only."""
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits


class AutoEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.GELU(), nn.Conv2d(8, 12, 3, stride=2, padding=1))
        self.code = nn.Linear(48, 12)
        self.back = nn.Linear(12, 48)
        self.up = nn.Sequential(nn.ConvTranspose2d(12, 8, 4, 2, 1), nn.GELU(), nn.ConvTranspose2d(8, 1, 4, 2, 1))

    def forward(self, x):
        code = torch.tanh(self.code(self.down(x).flatten(1)))
        return self.up(self.back(code).unflatten(1, (12, 2, 2)))


class ShardedAdam:
    """Parameter i belongs to rank i % world, which updates it and sends it to the others."""

    def __init__(self, model, rank, world, lr):
        self.rank, self.world = rank, world
        self.named = list(model.named_parameters())
        self.mine = {name: p for i, (name, p) in enumerate(self.named) if i % world == rank}
        self.inner = torch.optim.Adam(self.mine.values(), lr=lr)

    def step(self):
        for _, p in self.named:
            if self.world > 1:
                dist.all_reduce(p.grad)
            p.grad.div_(self.world)
        self.inner.step()
        if self.world > 1:
            for i, (_, p) in enumerate(self.named):
                dist.broadcast(p.data, i % self.world)
        for _, p in self.named:
            p.grad = None

    def state_dict(self):
        return {name: self.inner.state[p] for name, p in self.mine.items()}

    def load_state_dict(self, moments):
        for name, p in self.mine.items():
            if name in moments:
                self.inner.state[p] = {k: v.clone() for k, v in moments[name].items()}


class Job:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        torch.manual_seed(33)
        self.model = AutoEncoder()
        self.opt = ShardedAdam(self.model, rank, world, lr=3e-3)
        self.epoch = 0
        images = torch.tensor(load_digits().images).unsqueeze(1) / 16
        self.train, self.test = images[:960], images[960:1280]

    def run_epoch(self):
        gen = torch.Generator().manual_seed(70 + self.epoch)
        order = torch.randperm(len(self.train), generator=gen)
        noise = 0.2 * torch.randn(self.train.shape, generator=gen)
        for rows in order.split(64):
            mine = rows[self.rank::self.world]
            clean = self.train[mine]
            F.mse_loss(self.model(clean + noise[mine]), clean).backward()
            self.opt.step()
        self.epoch += 1
        with torch.no_grad():
            error = F.mse_loss(self.model(self.test), self.test).item()
        if self.rank == 0:
            print(f"epoch {self.epoch} reconstruction {error:.9f}")

    def save(self, path):
        state = {"model": self.model.state_dict(), "opt": self.opt.state_dict(), "epoch": self.epoch}
        if self.rank == 0:
            torch.save(state, path)
        if self.world > 1:
            dist.barrier()

    def restore(self, path):
        state = torch.load(path)
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["opt"])
        self.epoch = state["epoch"]
        if self.world > 1:
            dist.barrier()


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    where = [None]
    if world > 1:
        dist.init_process_group("gloo")
    if rank == 0:
        where = [tempfile.mkdtemp()]
    if world > 1:
        dist.broadcast_object_list(where, src=0)
    path = os.path.join(where[0], "last.pt")
    job = Job(rank, world)
    job.run_epoch()
    job.run_epoch()
    job.save(path)
    job = Job(rank, world)
    job.restore(path)
    job.run_epoch()
    job.run_epoch()
    if rank == 0:
        shutil.rmtree(where[0])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
