"""DINO on small images: student in DDP, teacher by EMA, centred teacher outputs, one global crop pair + local crops."""
import copy
import math
import os
import time
import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30105")


class DINOHead(nn.Module):
    def __init__(self, in_dim, out_dim, hidden=64, bottleneck=24):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(in_dim, hidden), nn.GELU(), nn.Linear(hidden, bottleneck))
        self.last_layer = nn.utils.parametrizations.weight_norm(nn.Linear(bottleneck, out_dim, bias=False))
        self.last_layer.parametrizations.weight.original0.data.fill_(1)
        self.last_layer.parametrizations.weight.original0.requires_grad = False

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, 48), nn.GELU())
        self.head = DINOHead(48, 40)

    def forward(self, crops):
        out = self.head(self.backbone(torch.cat(crops)))
        return out.chunk(len(crops))


class DINOLoss(nn.Module):
    def __init__(self, out_dim, student_temp=0.1, teacher_temp=0.05, center_momentum=0.9):
        super().__init__()
        self.st, self.tt, self.m = student_temp, teacher_temp, center_momentum
        self.register_buffer("center", torch.zeros(1, out_dim))

    def forward(self, student_out, teacher_out):
        t = [F.softmax((o - self.center) / self.tt, dim=-1).detach() for o in teacher_out]
        s = [F.log_softmax(o / self.st, dim=-1) for o in student_out]
        total, n = 0, 0
        for i, q in enumerate(t):
            for j, v in enumerate(s):
                if i == j:
                    continue  # we skip cases where student and teacher operate on the same view
                total = total + (-q * v).sum(-1).mean()
                n += 1
        self.update_center(torch.cat(teacher_out))
        return total / n

    @torch.no_grad()
    def update_center(self, teacher_output):
        batch_center = teacher_output.sum(0, keepdim=True)
        dist.all_reduce(batch_center)
        batch_center = batch_center / (len(teacher_output) * dist.get_world_size())
        self.center = self.center * self.m + batch_center * (1 - self.m)


def crops_of(img, rng):
    """two global crops and two local ones (three quarters of the image blanked)"""
    out = []
    for k in range(4):
        v = np.roll(img, rng.integers(-1, 2, 2), (0, 1)) + 0.1 * rng.standard_normal((8, 8))
        if k >= 2:
            r, c = rng.integers(0, 5, 2)
            keep = np.zeros((8, 8))
            keep[r:r + 4, c:c + 4] = 1
            v = v * keep
        out.append(v.reshape(-1))
    return np.stack(out).astype(np.float32)


def cosine_scheduler(base, final, n):
    return [final + 0.5 * (base - final) * (1 + math.cos(math.pi * i / n)) for i in range(n)]


def cancel_gradients_last_layer(epoch, model, freeze):
    if epoch >= freeze:
        return
    for n, p in model.named_parameters():
        if "last_layer" in n:
            p.grad = None


def train():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    images = load_digits().images[:1024].astype(np.float32) / 16
    student = Net()
    teacher = copy.deepcopy(student)  # no DDP: it never gets gradients
    for p in teacher.parameters():
        p.requires_grad = False
    student = nn.parallel.DistributedDataParallel(student)
    dino_loss = DINOLoss(40)
    opt = torch.optim.AdamW(student.parameters(), lr=0)
    B, epochs = 64, 4
    niter = len(images) // B
    lr_schedule, momentum_schedule = cosine_scheduler(2e-3, 1e-5, epochs * niter), cosine_scheduler(0.97, 1.0, epochs * niter)
    wd_schedule = cosine_scheduler(0.04, 0.4, epochs * niter)
    for epoch in range(epochs):
        perm = np.random.default_rng(epoch).permutation(len(images))
        for i in range(niter):
            it = epoch * niter + i
            for g in opt.param_groups:
                g["lr"], g["weight_decay"] = lr_schedule[it], wd_schedule[it]
            mine = perm[i * B:(i + 1) * B][rank::world]
            views = np.stack([crops_of(images[k], np.random.default_rng([epoch, k])) for k in mine], 1)
            views = [torch.from_numpy(v) for v in views]
            teacher_output = teacher(views[:2])
            loss = dino_loss(student(views), teacher_output)
            if not math.isfinite(loss.item()):
                raise SystemExit(f"Loss is {loss.item()}, stopping training")
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), 3.0)
            cancel_gradients_last_layer(epoch, student, freeze=1)
            opt.step()
            with torch.no_grad():
                m = momentum_schedule[it]
                for q, k in zip(student.module.parameters(), teacher.parameters()):
                    k.mul_(m).add_((1 - m) * q)
        stat = torch.tensor([loss.item()])
        dist.all_reduce(stat)
        if rank == 0:
            ent = -(F.softmax(dino_loss.center, -1) * F.log_softmax(dino_loss.center, -1)).sum()
            print(f"epoch {epoch} loss {stat.item() / world:.4f} centre entropy {ent:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    train()
