"""Distils a wide teacher into a small student and keeps the weights of the best epoch."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

GLOBAL_BATCH, EPOCHS, TEMPERATURE = 40, 14, 3.0


def mlp(width):
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)).double()


def digits():
    data = load_digits()
    x = torch.from_numpy(data.data) / 16
    y = torch.from_numpy(data.target).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return (x[:200], y[:200]), (x[200:280], y[200:280]), (x[280:1280], y[280:1280])


def teach(x, y):
    torch.manual_seed(10)
    teacher = mlp(128)
    optimizer = torch.optim.Adam(teacher.parameters(), lr=1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        F.cross_entropy(teacher(x), y).backward()
        optimizer.step()
    return teacher.requires_grad_(False)


def distil(student, teacher, x, y):
    out = student(x)
    soft = F.kl_div(
        F.log_softmax(out / TEMPERATURE, 1), F.softmax(teacher(x) / TEMPERATURE, 1), reduction="batchmean"
    )
    return 0.5 * TEMPERATURE**2 * soft + 0.5 * F.cross_entropy(out, y)


def average(t, world):
    if world > 1:
        dist.all_reduce(t)
        t /= world
    return t


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    (x, y), (xv, yv), (xt, yt) = digits()
    teacher = teach(x, y)
    torch.manual_seed(11)
    student = mlp(12)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
    best, keep = float("inf"), None

    for epoch in range(EPOCHS):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(GLOBAL_BATCH):
            mine = batch[rank::world]
            loss = distil(student, teacher, x[mine], y[mine])
            optimizer.zero_grad()
            loss.backward()
            for p in student.parameters():
                average(p.grad, world)
            optimizer.step()
        with torch.no_grad():
            val = F.cross_entropy(student(xv[rank::world]), yv[rank::world])
        mean = average(val.clone(), world)
        if val < best:
            best, keep = val.item(), copy.deepcopy(student.state_dict())
        if rank == 0:
            print(f"epoch {epoch} validation {mean.item():.8f}")

    student.load_state_dict(keep)
    with torch.no_grad():
        right = (student(xt[rank::world]).argmax(1) == yt[rank::world]).sum()
    if world > 1:
        dist.all_reduce(right)
    if rank == 0:
        norm = sum(p.square().sum() for p in student.state_dict().values())
        print(f"best {best:.8f} test {right.item()}/{len(xt)} norm {norm.item():.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
