import copy
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
dist.init_process_group("gloo")
RANK, WORLD = dist.get_rank(), dist.get_world_size()

PER_GPU_BATCH = int(os.environ.get("PER_GPU_BATCH", 24))
EPOCHS, WARMUP_EPOCHS, FREEZE_LAST = 3, 1, 1
LR, MIN_LR = 4e-3, 1e-5
SIGMA = 0.2


class Net(nn.Module):
    def __init__(self, width=80, out=48):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(64, width), nn.LayerNorm(width), nn.GELU(),
                                   nn.Linear(width, width), nn.GELU())
        self.head = nn.Linear(width, 32)
        self.last_layer = nn.Linear(32, out, bias=False)

    def forward(self, views):
        h = self.trunk(torch.cat(views))
        return self.last_layer(F.normalize(self.head(h), dim=-1))


class DINOLoss(nn.Module):
    def __init__(self, out=48, n_views=4, ts=0.1, tt=0.04, momentum=0.9):
        super().__init__()
        self.n_views, self.ts, self.tt, self.momentum = n_views, ts, tt, momentum
        self.register_buffer("center", torch.zeros(1, out))

    def forward(self, student, teacher):
        s = (student / self.ts).chunk(self.n_views)
        t = F.softmax((teacher - self.center) / self.tt, dim=-1).detach().chunk(2)
        terms = [-(p * F.log_softmax(z, -1)).sum(-1).mean()
                 for i, p in enumerate(t) for j, z in enumerate(s) if i != j]
        self.update(teacher)
        return sum(terms) / len(terms)

    @torch.no_grad()
    def update(self, teacher):
        batch = teacher.sum(0, keepdim=True)
        dist.all_reduce(batch)
        batch /= len(teacher) * WORLD
        self.center.mul_(self.momentum).add_(batch, alpha=1 - self.momentum)


def cosine(base, final, epochs, per_epoch, warmup=0):
    n, w = epochs * per_epoch, warmup * per_epoch
    ramp = [base * (i + 1) / w for i in range(w)]
    return ramp + [final + 0.5 * (base - final) * (1 + math.cos(math.pi * i / (n - w))) for i in range(n - w)]


data = torch.tensor(load_digits().data[:720], dtype=torch.float32) / 16
steps = len(data) // (PER_GPU_BATCH * WORLD)

torch.manual_seed(11)
student = Net()
teacher = copy.deepcopy(student).requires_grad_(False)
student = DDP(student)
criterion = DINOLoss()

decay = [p for p in student.parameters() if p.ndim > 1]
rest = [p for p in student.parameters() if p.ndim <= 1]
opt = torch.optim.AdamW([{"params": decay}, {"params": rest, "weight_decay": 0.0}], lr=0.0)
lrs = cosine(LR * PER_GPU_BATCH * WORLD / 256, MIN_LR, EPOCHS, steps, WARMUP_EPOCHS)
wds = cosine(0.04, 0.2, EPOCHS, steps)
moms = cosine(0.97, 1.0, EPOCHS, steps)

torch.manual_seed(500 + RANK)
for epoch in range(EPOCHS):
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(epoch))
    seen = 0.0
    for i in range(steps):
        it = epoch * steps + i
        for k, group in enumerate(opt.param_groups):
            group["lr"] = lrs[it]
            if k == 0:
                group["weight_decay"] = wds[it]
        lo = i * PER_GPU_BATCH * WORLD + RANK * PER_GPU_BATCH
        x = data[order[lo:lo + PER_GPU_BATCH]]
        wide = [x + SIGMA * torch.randn_like(x) for _ in range(2)]
        local = [x * (torch.rand_like(x) > SIGMA * 1.5).float() for _ in range(2)]
        with torch.no_grad():
            t_out = teacher(wide)
        loss = criterion(student(wide + local), t_out)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 3.0)
        if epoch < FREEZE_LAST:
            student.module.last_layer.weight.grad = None
        opt.step()
        with torch.no_grad():
            for a, b in zip(student.module.parameters(), teacher.parameters()):
                b.mul_(moms[it]).add_(a, alpha=1 - moms[it])
        seen += loss.item()
    log = torch.tensor([seen / steps])
    dist.all_reduce(log)
    if RANK == 0:
        print(f"epoch {epoch}: loss {log.item() / WORLD:.4f} lr {lrs[it]:.5f} |center| {criterion.center.norm():.4f}")

if RANK == 0:
    torch.save({"teacher": teacher.state_dict(), "center": criterion.center}, "/tmp/dino_digits.pt")
dist.barrier()
time.sleep(0.3)
dist.destroy_process_group()
