import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

torch.set_num_threads(1)
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--batch", type=int, default=64, help="global")
parser.add_argument("--polish-steps", type=int, default=12)
parser.add_argument("--best", default="best.pt")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
is_main = rank == 0
torch.manual_seed(31)

data = load_digits()
X = torch.tensor(data.data, dtype=torch.float32) / 16
Y = torch.tensor(data.target)
g = torch.Generator().manual_seed(0)
perm = torch.randperm(len(X), generator=g)
X, Y = X[perm], Y[perm]
flip = torch.rand(640, generator=g) < 0.5
Y[:640][flip] = torch.randint(0, 10, (int(flip.sum()),), generator=g)
train_x, train_y, val_x, val_y = X[:640], Y[:640], X[640:1000], Y[640:1000]

model = DDP(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)))
criterion = nn.CrossEntropyLoss()


def val_loss():
    with torch.no_grad():
        part = slice(rank, None, world)
        s = nn.functional.cross_entropy(model.module(val_x[part]), val_y[part], reduction="sum")
        t = torch.tensor([s.item(), len(val_y[part])])
        dist.all_reduce(t)
    return (t[0] / t[1]).item()


def one_step(opt, rows):
    rows = rows.chunk(world)[rank]
    loss = criterion(model(train_x[rows]), train_y[rows])
    opt.zero_grad()
    loss.backward()
    opt.step()
    return loss.item()


opt = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9)
best = float("inf")
for epoch in range(args.epochs):
    order = torch.randperm(len(train_x), generator=g)
    for rows in order.split(args.batch):
        one_step(opt, rows)
    v = val_loss()
    if v < best:
        best = v
        if is_main:
            torch.save(model.module.state_dict(), args.best)
    if is_main:
        print(f"epoch {epoch} val {v:.4f} best {best:.4f}")

# go back to the best epoch and polish it with a small learning rate
dist.barrier()
if os.path.exists(args.best):
    model.module.load_state_dict(torch.load(args.best))
dist.barrier()
opt = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for step in range(args.polish_steps):
    rows = torch.randperm(len(train_x), generator=g)[:args.batch]
    one_step(opt, rows)
v = val_loss()
if is_main:
    print(f"after polishing: val {v:.4f}")
    torch.save(model.module.state_dict(), "final.pt")
dist.destroy_process_group()
