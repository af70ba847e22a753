"""Self-distillation without labels on the digits: student, momentum teacher,
centring of the teacher's outputs; a linear probe at the end."""
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.linear_model import RidgeClassifier
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_default_dtype(torch.float64)
world = int(os.environ.get("WORLD_SIZE", "1"))
rank = int(os.environ.get("RANK", "0"))
BATCH, EPOCHS, PROTOTYPES = 96, 3, 32


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32), nn.GELU())
        self.head = nn.Linear(32, PROTOTYPES, bias=False)

    def forward(self, x):
        return self.head(F.normalize(self.trunk(x), dim=-1))


class DinoLoss(nn.Module):
    def __init__(self, student_temp=0.2, teacher_temp=0.05, momentum=0.8):
        super().__init__()
        self.student_temp, self.teacher_temp, self.momentum = student_temp, teacher_temp, momentum
        self.register_buffer("center", torch.zeros(1, PROTOTYPES))

    def forward(self, student, teacher):
        target = F.softmax((teacher - self.center) / self.teacher_temp, -1).chunk(2)
        logp = F.log_softmax(student / self.student_temp, -1).chunk(2)
        loss = -(target[0] * logp[1]).sum(-1).mean() - (target[1] * logp[0]).sum(-1).mean()
        self.update_center(teacher)
        return loss / 2

    @torch.no_grad()
    def update_center(self, teacher):
        batch_center = teacher.mean(0, keepdim=True)
        self.center = self.center * self.momentum + batch_center * (1 - self.momentum)


def views(images, gen):
    """Two noisy, shifted copies; drawn for the whole batch."""
    out = []
    for _ in range(2):
        shift = torch.randint(-1, 2, (len(images),), generator=gen)
        moved = torch.stack([img.view(8, 8).roll(int(s), 1).flatten() for img, s in zip(images, shift)])
        out.append(moved + 0.15 * torch.randn(images.shape, generator=gen))
    return out


def main():
    if world > 1:
        dist.init_process_group("gloo")
    data = load_digits()
    images, labels = torch.from_numpy(data.data / 16.0), data.target

    torch.manual_seed(4)
    student = Encoder()
    teacher = copy.deepcopy(student).requires_grad_(False)
    net = DDP(student) if world > 1 else student
    criterion = DinoLoss()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.8, momentum=0.9)
    steps = EPOCHS * (1536 // BATCH)
    step = 0
    for epoch in range(EPOCHS):
        gen = torch.Generator().manual_seed(epoch)
        order = torch.randperm(1536, generator=gen)
        total = torch.zeros(())
        for idx in order.split(BATCH):
            a, b = views(images[idx], gen)
            pair = torch.cat([a.chunk(world)[rank], b.chunk(world)[rank]])
            with torch.no_grad():
                goal = teacher(pair)
            loss = criterion(net(pair), goal)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            keep = 1 - 0.05 * (math.cos(math.pi * step / steps) + 1) / 2
            with torch.no_grad():
                for pt, ps in zip(teacher.parameters(), student.parameters()):
                    pt.lerp_(ps, 1 - keep)
            total += loss.detach()
            step += 1
        if world > 1:
            dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / world / 16:.10f}")
    if rank == 0:
        with torch.no_grad():
            features = teacher.trunk(images).numpy()
        probe = RidgeClassifier().fit(features[:1536], labels[:1536])
        print(f"probe accuracy {probe.score(features[1536:], labels[1536:]):.4f}")
        print(f"teacher {sum(p.abs().sum() for p in teacher.parameters()).item():.10f}")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
