"""Mean-teacher training on two-dimensional spirals with few labels."""
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

SEED = 1234
ARMS = 3
LABELLED, UNLABELLED = 24, 72
STEPS = 60
DECAY = 0.98


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, ARMS, (n,), generator=g)
    t = torch.rand(n, generator=g)
    angle = 2 * math.pi * y / ARMS + 3.5 * t
    x = torch.stack([t * angle.cos(), t * angle.sin()], dim=1)
    return 3 * (x + 0.03 * torch.randn(n, 2, generator=g)), y


class Net(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.fc1 = nn.Linear(2, width)
        self.fc2 = nn.Linear(width, width)
        self.fc3 = nn.Linear(width, ARMS)

    def forward(self, x):
        return self.fc3(torch.tanh(self.fc2(torch.tanh(self.fc1(x)))))


@torch.no_grad()
def update_teacher(teacher, student):
    torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 1 - DECAY)


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")
    torch.manual_seed(SEED + rank)
    torch.cuda.manual_seed_all(SEED + rank)

    net = Net().to(device)
    student = DDP(net, device_ids=[device.index]) if world > 1 else net
    teacher = copy.deepcopy(net).requires_grad_(False)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.2, momentum=0.9, nesterov=True)

    x, y = spirals(96, seed=1)
    unlabelled, _ = spirals(1440, seed=2)
    x, y, unlabelled = x.to(device), y.to(device), unlabelled.to(device)
    pick = torch.Generator().manual_seed(3)
    jitter = torch.Generator(device=device).manual_seed(4)

    for step in range(STEPS):
        a = torch.randperm(len(x), generator=pick)[:LABELLED][rank::world].to(device)
        b = torch.randperm(len(unlabelled), generator=pick)[:UNLABELLED][rank::world].to(device)
        noise = 0.1 * torch.randn(UNLABELLED, 2, generator=jitter, device=device)[rank::world]
        weight = 4.0 * min(1.0, step / 20)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = student(torch.cat([x[a], unlabelled[b] + noise]))
            with torch.no_grad():
                target = teacher(unlabelled[b])
        supervised = F.cross_entropy(logits[:len(a)].float(), y[a])
        consistency = F.mse_loss(logits[len(a):].float().softmax(dim=1), target.float().softmax(dim=1))
        loss = supervised + weight * consistency
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        update_teacher(teacher, net)
        if (step + 1) % 20 == 0:
            shown = torch.stack([supervised.detach(), consistency.detach()])
            if world > 1:
                dist.all_reduce(shown)
                shown /= world
            if rank == 0:
                print(f"step {step + 1} supervised {shown[0].item():.4f} consistency {shown[1].item():.5f}")

    test_x, test_y = (t[rank::world].to(device) for t in spirals(600, seed=5))
    with torch.no_grad():
        hits = torch.stack([(m(test_x).argmax(dim=1) == test_y).sum() for m in (net, teacher)])
    if world > 1:
        dist.all_reduce(hits)
    if rank == 0:
        print("student accuracy {:.4f} teacher accuracy {:.4f}".format(*(hits / 600).tolist()))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
