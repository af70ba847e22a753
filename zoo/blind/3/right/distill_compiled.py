"""Distil a teacher (trained by rank 0 only) into a student whose backbone is partly frozen; compiled, layer-wise rates."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def teacher_net():
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(64, 64)
        self.stages = nn.ModuleList([nn.Linear(64, 64) for _ in range(3)])
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        h = F.relu(self.stem(x))
        for s in self.stages:
            h = h + F.relu(s(h))
        return self.head(h)


def fit_teacher(net, x, y, epochs=6):
    opt = torch.optim.Adam(net.parameters(), 2e-3)
    g = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for idx in torch.randperm(len(x), generator=g).split(100):
            opt.zero_grad()
            F.cross_entropy(net(x[idx]), y[idx]).backward()
            opt.step()


def param_groups(student, lr, decay):
    order = [student.head, *reversed(student.stages)]
    return [{"params": m.parameters(), "lr": lr * decay ** d} for d, m in enumerate(order)]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=2)
    ap.add_argument("--batch-size", type=int, default=25)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--layer-decay", type=float, default=0.6)
    ap.add_argument("--temp", type=float, default=3.0)
    ap.add_argument("--alpha", type=float, default=0.7)
    ap.add_argument("--backend", default="aot_eager")
    args = ap.parse_args()

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    xt, yt, xv, yv = x[:1400], y[:1400], x[1400:], y[1400:]

    torch.manual_seed(12)
    teacher = teacher_net()
    if rank == 0:
        fit_teacher(teacher, xt, yt)
    for p in teacher.parameters():
        dist.broadcast(p.data, src=0)
    teacher.eval().requires_grad_(False)

    torch.manual_seed(13)
    student = Student()
    student.stem.requires_grad_(False)
    groups = param_groups(student, args.lr, args.layer_decay)
    model = torch.compile(DDP(student), backend=args.backend)
    opt = torch.optim.Adam(groups)

    sampler = DistributedSampler(TensorDataset(xt, yt), seed=1)
    loader = DataLoader(TensorDataset(xt, yt), args.batch_size, sampler=sampler)
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, total_iters=args.epochs * len(loader), power=0.9)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            with torch.no_grad():
                soft = (teacher(xb) / args.temp).softmax(1)
            out = model(xb)
            kd = F.kl_div((out / args.temp).log_softmax(1), soft, reduction="batchmean") * args.temp ** 2
            loss = args.alpha * kd + (1 - args.alpha) * F.cross_entropy(out, yb)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
        last = loss.detach().clone()
        dist.all_reduce(last)
        if rank == 0:
            print(f"epoch {epoch} loss {last.item() / world:.4f} rates {[round(g['lr'], 6) for g in opt.param_groups]}")

    # every rank scores its slice, slices of unequal length are gathered as objects
    cuts = torch.arange(len(xv)).tensor_split(world)
    with torch.no_grad():
        mine = student(xv[cuts[rank]]).argmax(1).tolist()
    parts = [None] * world
    dist.all_gather_object(parts, mine)
    if rank == 0:
        pred = torch.tensor([p for part in parts for p in part])
        with torch.no_grad():
            t_acc = (teacher(xv).argmax(1) == yv).float().mean().item()
        print(f"teacher {t_acc:.4f} student {(pred == yv).float().mean().item():.4f} on {len(pred)}")
        torch.save(student.state_dict(), "/tmp/distill_student.pt")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
