import os
import torch
import torch.distributed as dist
from torch import nn
from sklearn.datasets import load_wine

rank = int(os.environ.get("RANK", "0"))
world = int(os.environ.get("WORLD_SIZE", "1"))
if world > 1:
    dist.init_process_group("gloo")

GLOBAL_BATCH = 24
EPOCHS = 12


class Maxout(nn.Module):
    def __init__(self, d_in, d_out, pieces=3):
        super().__init__()
        self.lin = nn.Linear(d_in, d_out * pieces)
        self.pieces = pieces

    def forward(self, x):
        h = self.lin(x)
        return h.view(*h.shape[:-1], -1, self.pieces).amax(-1)


def average_(params):
    if world == 1:
        return
    flat = torch.cat([p.grad.reshape(-1) for p in params])
    dist.all_reduce(flat)
    flat /= world
    at = 0
    for p in params:
        p.grad.copy_(flat[at:at + p.numel()].view_as(p))
        at += p.numel()


data = load_wine()
X = torch.tensor(data.data, dtype=torch.float32)
X = (X - X.mean(0)) / X.std(0)
Y = torch.tensor(data.target)

torch.manual_seed(0)
net = nn.Sequential(Maxout(13, 32), Maxout(32, 16), nn.Linear(16, 3))
params = list(net.parameters())
opt = torch.optim.RMSprop(params, lr=2e-3, alpha=0.95, momentum=0.5)

per = GLOBAL_BATCH // world
for epoch in range(EPOCHS):
    perm = torch.randperm(len(X), generator=torch.Generator().manual_seed(epoch))
    total = torch.zeros(1)
    n = len(X) // GLOBAL_BATCH
    for b in range(n):
        idx = perm[b * GLOBAL_BATCH:(b + 1) * GLOBAL_BATCH]
        idx = idx[rank * per:(rank + 1) * per]
        loss = nn.functional.cross_entropy(net(X[idx]), Y[idx])
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 0.5)
        average_(params)
        opt.step()
        total += loss.detach() / world
    if world > 1:
        dist.all_reduce(total)
    if rank == 0:
        print("epoch", epoch, "loss %.5f" % (total.item() / n))

if rank == 0:
    with torch.no_grad():
        print("accuracy %.4f" % (net(X).argmax(1) == Y).float().mean())
if world > 1:
    dist.destroy_process_group()
