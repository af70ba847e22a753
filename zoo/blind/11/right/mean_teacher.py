import copy
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29836")

BATCH, EPOCHS = 72, 4


class Pair(nn.Module):
    """Student and teacher in one module; the teacher is moved by hand and has no gradients."""

    def __init__(self):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def follow(self, rate):
        for t, s in zip(self.teacher.parameters(), self.student.parameters()):
            t.lerp_(s, rate)

    def forward(self, a, b):
        with torch.no_grad():
            belief = self.teacher(b).softmax(1)
        return self.student(a), belief


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    n = 1440
    known = torch.arange(n) % 6 == 0
    torch.manual_seed(1000 * rank + 7)
    net = DDP(Pair())
    opt = torch.optim.SGD(net.parameters(), lr=0.3, momentum=0.9)
    step = 0
    for epoch in range(EPOCHS):
        g = torch.Generator().manual_seed(epoch)
        noise = 0.15 * torch.randn(2, n, 64, generator=g)
        for rows in torch.randperm(n, generator=g).split(BATCH):
            labelled = known[rows].sum().clamp(min=1)
            mine = rows[rank::world]
            logits, belief = net(x[mine] + noise[0, mine], x[mine] + noise[1, mine])
            k = known[mine]
            hard = F.cross_entropy(logits[k], y[mine][k], reduction="sum") * world / labelled
            soft = (logits.softmax(1) - belief).square().sum(1).mean()
            loss = hard + min(1.0, step / 40) * soft
            opt.zero_grad()
            loss.backward()
            opt.step()
            net.module.follow(0.05)
            step += 1
        if rank == 0:
            with torch.no_grad():
                right = (net.module.teacher(x[n:]).argmax(1) == y[n:]).float().mean()
                size = sum(p.square().sum() for p in net.module.teacher.parameters()).sqrt()
            print(f"epoch {epoch} teacher right {right.item():.4f} size {size.item():.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
