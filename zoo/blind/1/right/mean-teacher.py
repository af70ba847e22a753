import copy
import argparse
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from sklearn.datasets import load_digits

# Semi-supervised digits: few labels, consistency with an averaged teacher.

p = argparse.ArgumentParser()
p.add_argument("--steps", type=int, default=40)
p.add_argument("--labeled-bs", type=int, default=8)
p.add_argument("--unlabeled-bs", type=int, default=24)
p.add_argument("--sigma", type=float, default=0.15)
p.add_argument("--ema", type=float, default=0.95)
p.add_argument("--drop", type=float, default=0.1)
opt = p.parse_args()

torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

X, Y = load_digits(return_X_y=True)
X = torch.tensor(X, dtype=torch.float32) / 16
Y = torch.tensor(Y)
lab_x, lab_y = X[:160], Y[:160]
unl_x = X[160:1300]
val_x, val_y = X[1300:], Y[1300:]


def index_stream(n, per_rank, seed):
    """One common shuffled order for everybody; each process cuts its own slice out of every global batch."""
    g = torch.Generator().manual_seed(seed)
    pool = torch.empty(0, dtype=torch.long)
    total = per_rank * world
    while True:
        while len(pool) < total:
            pool = torch.cat([pool, torch.randperm(n, generator=g)])
        head, pool = pool[:total], pool[total:]
        yield head[rank * per_rank:(rank + 1) * per_rank]


def make_net():
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Dropout(opt.drop), nn.Linear(96, 96), nn.GELU(), nn.Linear(96, 10))


torch.manual_seed(0)
student = make_net()
teacher = copy.deepcopy(student)
for q in teacher.parameters():
    q.requires_grad_(False)

torch.manual_seed(1000 + rank)  # noise and dropout differ between processes from here on
ddp = DistributedDataParallel(student)
sgd = torch.optim.SGD(ddp.parameters(), lr=0.15, momentum=0.9, nesterov=True, weight_decay=1e-4)
lab = index_stream(len(lab_x), opt.labeled_bs, 5)
unl = index_stream(len(unl_x), opt.unlabeled_bs, 6)


def jitter(t):
    return t + opt.sigma * torch.randn_like(t)


for step in range(opt.steps):
    li, ui = next(lab), next(unl)
    both = torch.cat([lab_x[li], unl_x[ui]])
    out = ddp(jitter(both))
    with torch.no_grad():
        teacher.train()
        target = teacher(jitter(both)).softmax(1)
    sup = F.cross_entropy(out[:len(li)], lab_y[li])
    ramp = min(1.0, step / 20)
    cons = F.mse_loss(out.softmax(1), target)
    loss = sup + 8.0 * ramp * cons
    sgd.zero_grad()
    loss.backward()
    sgd.step()

    decay = min(opt.ema, 1 - 1 / (step + 2))
    with torch.no_grad():
        for t, s in zip(teacher.parameters(), student.parameters()):
            t.lerp_(s, 1 - decay)

    if step % 10 == 9:
        print(f"[rank {rank}] step {step + 1} sup {sup.item():.3f} cons {cons.item():.4f}", flush=True)

if rank == 0:
    teacher.eval(), student.eval()
    with torch.no_grad():
        for name, net in (("student", student), ("teacher", teacher)):
            print(name, "val acc", f"{(net(val_x).argmax(1) == val_y).float().mean():.4f}")
dist.barrier()
dist.destroy_process_group()
