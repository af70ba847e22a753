"""Flat-parameter trainer: every process owns a slice of the parameters with the AdamW state for it.
Half way the trainer is thrown away and rebuilt from its files."""
import argparse
import pathlib
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % 3
    r = torch.rand(n, generator=g) * 0.9 + 0.1
    angle = 4 * r + label * 2.094 + 0.15 * torch.randn(n, generator=g)
    xy = torch.stack([r * angle.cos(), r * angle.sin()], 1)
    return torch.cat([xy, xy ** 2, xy[:, :1] * xy[:, 1:], r[:, None]], 1), label


class ShardedTrainer:
    def __init__(self, seed, lr):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
        self.numel = sum(p.numel() for p in self.model.parameters())
        self.slice = -(-self.numel // self.world)
        self.own = nn.Parameter(self.cut(parameters_to_vector(self.model.parameters()).detach()))
        self.optim = torch.optim.AdamW([self.own], lr=lr, weight_decay=0.02)
        self.step_count = 0

    def cut(self, flat):
        flat = F.pad(flat, (0, self.slice * self.world - flat.numel()))
        return flat[self.rank * self.slice:(self.rank + 1) * self.slice].clone()

    def publish(self):
        parts = [torch.empty(self.slice) for _ in range(self.world)]
        dist.all_gather(parts, self.own.detach())
        vector_to_parameters(torch.cat(parts)[:self.numel], self.model.parameters())

    def step(self, x, y):
        loss = F.cross_entropy(self.model(x), y)
        grads = torch.autograd.grad(loss, list(self.model.parameters()))
        flat = torch.cat([g.flatten() for g in grads])
        dist.all_reduce(flat)
        self.own.grad = self.cut(flat / self.world)
        self.optim.step()
        self.publish()
        self.step_count += 1
        return loss.detach()

    def save(self, folder):
        torch.save({"step": self.step_count,
                    "model": self.model.state_dict(),
                    "optim": self.optim.state_dict()},
                   folder / f"step{self.step_count:05d}-shard{self.rank}.pt")
        dist.barrier()

    def load_latest(self, folder):
        newest = sorted(folder.glob(f"step*-shard{self.rank}.pt"))[-1]
        blob = torch.load(newest)
        self.model.load_state_dict(blob["model"])
        self.own.data.copy_(self.cut(parameters_to_vector(self.model.parameters()).detach()))
        self.optim.load_state_dict(blob["optim"])
        self.step_count = blob["step"]


def run(trainer, until, x, y, batch, seed):
    while trainer.step_count < until:
        g = torch.Generator().manual_seed(seed * 7919 + trainer.step_count)
        rows = torch.randint(len(x), (batch,), generator=g)[trainer.rank::trainer.world]
        loss = trainer.step(x[rows], y[rows])
        if trainer.step_count % 6 == 0:
            dist.all_reduce(loss)
            if trainer.rank == 0:
                print(f"step {trainer.step_count} loss {loss.item() / trainer.world:.6f}")


if __name__ == "__main__":
    cli = argparse.ArgumentParser()
    cli.add_argument("--steps", type=int, default=48)
    cli.add_argument("--save-every", type=int, default=12)
    cli.add_argument("--rebuild-at", type=int, default=24)
    cli.add_argument("--batch", type=int, default=64)
    cli.add_argument("--lr", type=float, default=0.01)
    cli.add_argument("--seed", type=int, default=4)
    a = cli.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    box = [tempfile.mkdtemp(prefix="shards-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    folder = pathlib.Path(box[0])
    x, y = spirals(1500, a.seed)

    trainer = ShardedTrainer(a.seed, a.lr)
    while trainer.step_count < a.rebuild_at:
        run(trainer, trainer.step_count + a.save_every, x, y, a.batch, a.seed)
        trainer.save(folder)
    trainer = ShardedTrainer(a.seed + 1, a.lr)
    trainer.load_latest(folder)
    run(trainer, a.steps, x, y, a.batch, a.seed)

    dist.barrier()
    if trainer.rank == 0:
        print(f"done, accuracy {(trainer.model(x).argmax(1) == y).float().mean():.4f}")
        shutil.rmtree(folder)
    time.sleep(0.3)
    dist.destroy_process_group()
