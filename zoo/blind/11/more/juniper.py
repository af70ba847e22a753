# Knowledge distillation: teacher trained by one process, student by all
import os, time
import torch
import torch.nn as nn
import torch.nn.functional as F
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from sklearn.datasets import load_digits
from sklearn.preprocessing import StandardScaler

TEACHER_STEPS, STUDENT_EPOCHS, BATCH, TEMP, ALPHA = 60, 4, 60, 4.0, 0.7


def setup():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "30110")
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def load():
    x, y = load_digits(return_X_y=True)
    x = StandardScaler().fit_transform(x)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    return (x[:1440], y[:1440]), (x[1440:], y[1440:])


def train_teacher(x, y):
    """Too small to be worth distributing. Trains on everything in whole batches."""
    torch.manual_seed(11)
    net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    for step in range(TEACHER_STEPS):
        opt.zero_grad()
        F.cross_entropy(net(x), y).backward()
        opt.step()
    return net


def get_teacher(rank, x, y):
    if rank == 0:
        net = train_teacher(x, y)
        payload = [net]
    else:
        payload = [None]
    dist.broadcast_object_list(payload, src=0)
    net = payload[0].eval()
    for p in net.parameters():
        p.requires_grad_(False)
    return net


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 24), nn.Tanh())
        self.head = nn.Linear(24, 10)
        self.hint = nn.Linear(24, 256, bias=False)  # regressor to the hidden layer of the teacher

    def forward(self, x):
        h = self.body(x)
        return self.head(h), self.hint(h)


def kd_loss(student_logits, teacher_logits, T):
    p = F.log_softmax(student_logits / T, dim=1)
    q = F.softmax(teacher_logits / T, dim=1)
    return F.kl_div(p, q, reduction="batchmean") * T * T


@torch.no_grad()
def evaluate(net, x, y):
    """All processes evaluate a slice, the counts are added."""
    rank, world = dist.get_rank(), dist.get_world_size()
    out = net(x[rank::world])
    out = out[0] if isinstance(out, tuple) else out
    c = (out.argmax(1) == y[rank::world]).sum()
    dist.all_reduce(c)
    return c.item() / len(x)


def main():
    rank, world = setup()
    (x, y), (xt, yt) = load()
    teacher = get_teacher(rank, x, y)
    acc = evaluate(teacher, xt, yt)
    if rank == 0:
        print(f"teacher {acc:.4f}")
    torch.manual_seed(5)
    student = DDP(Student())
    opt = torch.optim.AdamW(student.parameters(), lr=4e-3)
    # the teacher never changes, so its outputs are computed once
    with torch.no_grad():
        t_hidden = teacher[:5](x)
        t_logits = teacher[5:](t_hidden)
    n = BATCH // world
    for epoch in range(STUDENT_EPOCHS):
        torch.manual_seed(1000 + epoch)  # the same permutation on all processes
        perm = torch.randperm(len(x))
        for start in range(rank * n, len(x), BATCH):
            b = perm[start:start + n]
            logits, hint = student(x[b])
            loss = ALPHA * kd_loss(logits, t_logits[b], TEMP) + (1 - ALPHA) * F.cross_entropy(logits, y[b])
            loss = loss + 0.1 * F.mse_loss(hint, t_hidden[b])
            opt.zero_grad()
            loss.backward()
            opt.step()
        acc = evaluate(student.module, xt, yt)
        if rank == 0:
            print(f"epoch {epoch}: student {acc:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
