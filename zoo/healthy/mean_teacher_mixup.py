"""Semi-supervised classification: mean teacher, mixup in the dataset, soft labels."""

import copy
import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Mixed(Dataset):
    def __init__(self, n=72, classes=3, alpha=0.4):
        g = torch.Generator().manual_seed(30)
        self.y = torch.randint(0, classes, (n,), generator=g)
        self.x = torch.randn(n, 7, generator=g) + 1.5 * torch.eye(classes, 7)[self.y]
        self.classes, self.alpha, self.epoch = classes, alpha, 0

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        rng = random.Random(self.epoch * 1000 + i)
        j, lam = rng.randrange(len(self.x)), rng.betavariate(self.alpha, self.alpha)
        onehot = F.one_hot(self.y, self.classes).float()
        return lam * self.x[i] + (1 - lam) * self.x[j], lam * onehot[i] + (1 - lam) * onehot[j]


class MeanTeacher:
    def __init__(self):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(7, 20), nn.ReLU(), nn.Linear(20, 3))
        self.teacher = copy.deepcopy(net).requires_grad_(False)
        self.student = DDP(net)
        self.data = Mixed()
        self.sampler = DistributedSampler(self.data)
        self.loader = DataLoader(self.data, 12 // dist.get_world_size(), sampler=self.sampler)
        self.optimizer = torch.optim.Adam(self.student.parameters(), lr=4e-3)
        self.steps = 0

    @torch.no_grad()
    def update_teacher(self):
        self.steps += 1
        decay = min(0.95, self.steps / (self.steps + 3))
        for t, s in zip(self.teacher.parameters(), self.student.module.parameters()):
            t.lerp_(s, 1 - decay)

    def fit(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            self.data.epoch = epoch
            ramp = min(1.0, epoch / 2)
            for x, soft in self.loader:
                logits = self.student(x)
                with torch.no_grad():
                    guide = self.teacher(x).softmax(-1)
                loss = F.cross_entropy(logits, soft) + ramp * F.mse_loss(logits.softmax(-1), guide)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.update_teacher()
            if dist.get_rank() == 0:
                print(f"epoch {epoch} loss {loss.item():.4f}")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    MeanTeacher().fit(3)
    dist.destroy_process_group()
