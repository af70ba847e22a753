"""Distillation of a wide teacher into a small student, with progress reports of the
running validation figures."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_default_dtype(torch.float64)
TEMPERATURE, CLASSES, FEATURES = 2.0, 7, 12


class RunningFigures:
    """Agreement with the teacher and divergence, over everything seen so far."""

    def __init__(self):
        self.sums = torch.zeros(3)

    def update(self, student, teacher):
        agree = (student.argmax(1) == teacher.argmax(1)).double().sum()
        divergence = F.kl_div(student.log_softmax(1), teacher.softmax(1), reduction="sum")
        self.sums += torch.stack([agree, divergence, torch.tensor(float(len(student)))])

    def compute(self):
        sums = self.sums.clone()
        if dist.is_initialized():
            dist.all_reduce(sums)
        return (sums[:2] / sums[2]).tolist()


def mlp(*sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.SELU()]
    return nn.Sequential(*layers[:-1])


def inputs(n, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, FEATURES, generator=gen)
    spread = torch.linspace(0.3, 2.5, n)[:, None]
    return x * spread


def validate(student, teacher, data, batch, rank, world, log_every=2):
    figures = RunningFigures()
    lines = []
    with torch.no_grad():
        for i, rows in enumerate(data.split(batch)):
            mine = rows.chunk(world)[rank]
            figures.update(student(mine), teacher(mine))
            if (i + 1) % log_every == 0:
                agreement, divergence = figures.compute()
                lines.append(f"{agreement:.6f}/{divergence:.8f}")
    if rank == 0:
        print("  validation", " ".join(lines))
    return figures.compute()


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(14)
    teacher = mlp(FEATURES, 96, 96, CLASSES).eval().requires_grad_(False)
    teacher[-1].weight *= 6
    student = mlp(FEATURES, 20, CLASSES)
    net = DDP(student) if world > 1 else student
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-2)

    train, valid = inputs(1024, 1), inputs(480, 2)
    batch = 64
    for epoch in range(3):
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch))
        for chunk in order.split(batch):
            x = train[chunk.chunk(world)[rank]]
            target = (teacher(x) / TEMPERATURE).softmax(1)
            guess = (net(x) / TEMPERATURE).log_softmax(1)
            loss = F.kl_div(guess, target, reduction="batchmean") * TEMPERATURE ** 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        agreement, divergence = validate(student, teacher, valid, 48, rank, world)
        if rank == 0:
            weights = sum(p.detach().abs().sum() for p in student.parameters()).item()
            print(f"epoch {epoch} agreement {agreement:.6f} divergence {divergence:.8f} "
                  f"weights {weights:.10f}")
    if world > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
