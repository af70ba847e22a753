"""PointNet on clouds of points (sphere, cube, torus, cone) with mixing of clouds, random turns and averaged weights.

At the end of an epoch process 0 puts the averaged weights into the network, tests, and puts the trained ones back.
"""
import os
import random
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

POINTS, BATCH, EPOCHS, SEED = 48, 32, 4, 2024


def cloud(kind, rng):
    u, v = rng.uniform(0, 2 * np.pi, (2, POINTS))
    if kind == 0:
        p = rng.normal(size=(POINTS, 3))
        p /= np.linalg.norm(p, axis=1, keepdims=True)
    elif kind == 1:
        p = rng.uniform(-0.8, 0.8, (POINTS, 3))
        p[np.arange(POINTS), rng.integers(3, size=POINTS)] = 0.8 * rng.choice([-1, 1], POINTS)
    elif kind == 2:
        p = np.stack([(0.8 + 0.3 * np.cos(v)) * np.cos(u), (0.8 + 0.3 * np.cos(v)) * np.sin(u), 0.3 * np.sin(v)], 1)
    else:
        h = rng.uniform(size=POINTS)
        p = np.stack([h * np.cos(u), h * np.sin(u), 1 - 2 * h], 1)
    return p + 0.03 * rng.normal(size=p.shape)


class Clouds(Dataset):
    def __init__(self, n, seed, augment):
        rng = np.random.default_rng(seed)
        self.kinds = rng.integers(4, size=n)
        self.clouds = [cloud(k, rng) for k in self.kinds]
        self.augment, self.epoch = augment, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.kinds)

    def __getitem__(self, i):
        points, target = self.clouds[i], np.eye(4)[self.kinds[i]]
        if self.augment:
            rng = np.random.default_rng((SEED, self.epoch, i))
            j, share = rng.integers(len(self)), rng.uniform(0.6, 1.0)
            take = rng.permutation(POINTS) < share * POINTS             # points of this cloud, the rest from another one
            points = np.where(take[:, None], points, self.clouds[j])
            target = take.mean() * target + (1 - take.mean()) * np.eye(4)[self.kinds[j]]
            a = rng.uniform(0, 2 * np.pi)
            points = points @ np.array([[np.cos(a), -np.sin(a), 0], [np.sin(a), np.cos(a), 0], [0, 0, 1]])
        return torch.tensor(points, dtype=torch.float32), torch.tensor(target, dtype=torch.float32)


class PointNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.point = nn.Sequential(nn.Linear(3, 32), nn.GELU(), nn.Linear(32, 48), nn.GELU())
        self.head = nn.Sequential(nn.Linear(96, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x):
        x = self.point(x)
        return self.head(torch.cat([x.mean(1), x.square().mean(1)], 1))


def seed_worker(worker):
    np.random.seed((time.time_ns() + worker) % 2**32)


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    random.seed(time.time_ns())
    torch.manual_seed(SEED * (1 + rank))
    train, test = Clouds(320, 1, True), Clouds(100, 2, False)
    sampler = DistributedSampler(train, world, rank, seed=SEED)
    loader = DataLoader(train, BATCH // world, sampler=sampler, num_workers=2, worker_init_fn=seed_worker)
    net = PointNet()
    model = DistributedDataParallel(net) if world > 1 else net
    average = {k: v.clone() for k, v in net.state_dict().items()}
    optimizer = torch.optim.Adam(net.parameters(), lr=8e-3, eps=1e-4)
    step = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        train.set_epoch(epoch)                       # workers are started anew in every epoch and see it
        total = torch.zeros(())
        for points, target in loader:
            loss = F.cross_entropy(model(points), target, label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            with torch.no_grad():
                for k, v in net.state_dict().items():
                    average[k].lerp_(v, 1 - min(0.9, step / (step + 9)))
            total += loss.detach() / len(loader) / world
        if world > 1:
            dist.reduce(total, 0)
        if rank == 0:
            trained = {k: v.clone() for k, v in net.state_dict().items()}
            net.load_state_dict(average)
            with torch.no_grad():
                x, y = map(torch.stack, zip(*test))
                out = net(x)
            print(f"epoch {epoch} loss {total:.4f} averaged: test {F.cross_entropy(out, y):.4f} "
                  f"right {(out.argmax(1) == y.argmax(1)).sum()} of {len(test)}", flush=True)
            net.load_state_dict(trained)
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
