"""Two spirals with hard-example sampling: each epoch draws half of the points, preferring those with a large last loss."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler


class Spirals(Dataset):
    def __init__(self, count, seed):
        gen = torch.Generator().manual_seed(seed)
        turn = torch.rand(count, generator=gen, dtype=torch.float64) * 1.25 * math.pi + 0.5
        self.label = torch.arange(count) % 2
        angle = turn + math.pi * self.label
        self.point = torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 5
        self.point += 0.05 * torch.randn(count, 2, generator=gen, dtype=torch.float64)

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return i, self.point[i], self.label[i]


class HardSampler(Sampler):
    def __init__(self, count, rank, world, share=0.5, seed=0):
        self.count, self.rank, self.world, self.seed = count, rank, world, seed
        self.draws = int(count * share)
        self.epoch = 0
        self.score = torch.ones(count, dtype=torch.float64)
        self.fresh = torch.zeros(count, dtype=torch.float64)
        self.seen = torch.zeros(count, dtype=torch.float64)

    def __len__(self):
        return self.draws // self.world

    def __iter__(self):
        gen = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.multinomial(self.score + 0.05, self.draws, replacement=False, generator=gen)
        return iter(order[self.rank::self.world].tolist())

    def record(self, ids, losses):
        self.fresh[ids] = losses
        self.seen[ids] = 1

    def end_epoch(self):
        if self.world > 1:
            dist.all_reduce(self.fresh)
            dist.all_reduce(self.seen)
        self.score = torch.where(self.seen > 0, self.fresh, self.score)
        self.fresh.zero_()
        self.seen.zero_()
        self.epoch += 1


def make_model():
    torch.manual_seed(17)
    return nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)).double()


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    train, test = Spirals(512, seed=1), Spirals(256, seed=2)
    sampler = HardSampler(len(train), rank, world)
    loader = DataLoader(train, batch_size=32 // world, sampler=sampler)
    model = make_model()
    net = DistributedDataParallel(model) if world > 1 else model
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(10):
        total = torch.zeros(2, dtype=torch.float64)
        for ids, x, y in loader:
            losses = F.cross_entropy(net(x), y, reduction="none")
            opt.zero_grad()
            losses.mean().backward()
            opt.step()
            sampler.record(ids, losses.detach())
            total += torch.stack([losses.detach().sum(), torch.tensor(float(len(ids)), dtype=torch.float64)])
        sampler.end_epoch()
        if world > 1:
            dist.all_reduce(total)
        with torch.no_grad():
            out = model(test.point)
            test_loss = F.cross_entropy(out, test.label).item()
            hits = (out.argmax(1) == test.label).sum().item()
        if rank == 0:
            mean = (total[0] / total[1]).item()
            print(f"epoch {epoch:2d} train {mean:.8f} test {test_loss:.8f} hits {hits}/{len(test)}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
