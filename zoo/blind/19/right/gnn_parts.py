"""Full-graph GCN, nodes cut in uneven parts; dropout masks are drawn for the whole graph; early stopping."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

torch.set_default_dtype(torch.float64)
DISTRIBUTED = int(os.environ.get("WORLD_SIZE", "1")) > 1
if DISTRIBUTED:
    dist.init_process_group("gloo")
RANK = dist.get_rank() if DISTRIBUTED else 0
WORLD = dist.get_world_size() if DISTRIBUTED else 1
NODES, CLASSES, FEATURES, HIDDEN = 250, 4, 16, 24
PATIENCE, MAX_EPOCHS, DROP = 8, 120, 0.4


def block_model(seed=0):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (NODES,), generator=g)
    p = torch.where(y[:, None] == y[None], 0.06, 0.015)
    upper = torch.triu(torch.rand(NODES, NODES, generator=g) < p, 1).double()
    adj = upper + upper.T + torch.eye(NODES)
    d = adj.sum(1).rsqrt()
    x = torch.randn(NODES, FEATURES, generator=g)
    x[torch.arange(NODES), y] += 0.9
    role = torch.randperm(NODES, generator=g)
    return d[:, None] * adj * d[None], x, y, role[:60], role[60:120], role[120:]


class HaloGather(torch.autograd.Function):
    """Rows of all parts, in node order; parts may differ in length."""

    @staticmethod
    def forward(ctx, rows, bounds):
        ctx.bounds = bounds
        full = rows.new_zeros(bounds[-1][1], rows.size(1))
        lo, hi = bounds[RANK]
        full[lo:hi] = rows
        dist.all_reduce(full)
        return full

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        lo, hi = ctx.bounds[RANK]
        return grad[lo:hi], None


def gather(rows, bounds):
    return HaloGather.apply(rows, bounds) if DISTRIBUTED else rows


def total(t):
    if DISTRIBUTED:
        dist.all_reduce(t)
    return t


class Dropper:
    """One stream for the whole graph: every rank draws all nodes' masks and keeps its own rows."""

    def __init__(self, seed, lo, hi):
        self.g, self.lo, self.hi = torch.Generator().manual_seed(seed), lo, hi

    def __call__(self, x):
        keep = torch.rand(NODES, x.size(1), generator=self.g) >= DROP
        return x * keep[self.lo:self.hi] / (1 - DROP)


class GCN(nn.Module):
    def __init__(self, adj_rows, bounds, drop):
        super().__init__()
        self.adj, self.bounds, self.drop = adj_rows, bounds, drop
        self.w1, self.w2 = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.skip = nn.Linear(FEATURES, HIDDEN, bias=False)

    def forward(self, x):
        if self.training:
            x = self.drop(x)
        h = F.relu(self.adj @ gather(self.w1(x), self.bounds) + self.skip(x))
        if self.training:
            h = self.drop(h)
        return self.adj @ gather(self.w2(h), self.bounds)


def select(ids, lo, hi):
    return ids[(ids >= lo) & (ids < hi)] - lo


adj, x, y, train_ids, valid_ids, test_ids = block_model()
# parts by edges, not by nodes, so the lengths differ
work = (adj > 0).sum(1).cumsum(0)
cuts = [0] + [int((work < work[-1] * k / WORLD).sum()) for k in range(1, WORLD)] + [NODES]
bounds = list(zip(cuts, cuts[1:]))
lo, hi = bounds[RANK]
x_own, y_own = x[lo:hi], y[lo:hi]
parts = {"train": (select(train_ids, lo, hi), len(train_ids)),
         "valid": (select(valid_ids, lo, hi), len(valid_ids)),
         "test": (select(test_ids, lo, hi), len(test_ids))}

torch.manual_seed(7)
net = GCN(adj[lo:hi].contiguous(), bounds, Dropper(8, lo, hi))
optim = torch.optim.Adam([{"params": [net.w1.weight, net.w1.bias, net.skip.weight], "weight_decay": 5e-4},
                          {"params": list(net.w2.parameters())}], lr=0.02)


def measure(name):
    ids, count = parts[name]
    with torch.no_grad():
        net.eval()
        logits = net(x_own)[ids]
        net.train()
        res = torch.stack([F.cross_entropy(logits, y_own[ids], reduction="sum"),
                           (logits.argmax(1) == y_own[ids]).sum().double()])
    return (total(res) / count).tolist()


best, best_state, waited = float("inf"), None, 0
for epoch in range(MAX_EPOCHS):
    ids, count = parts["train"]
    loss = F.cross_entropy(net(x_own)[ids], y_own[ids], reduction="sum") / count
    optim.zero_grad()
    loss.backward()
    for p in net.parameters():
        total(p.grad)
    optim.step()
    valid_loss, valid_acc = measure("valid")
    if valid_loss < best:
        best, best_state, waited = valid_loss, copy.deepcopy(net.state_dict()), 0
    else:
        waited += 1
    if RANK == 0 and epoch % 10 == 0:
        print(f"epoch {epoch} valid {valid_loss:.10f} acc {valid_acc:.6f}")
    if waited >= PATIENCE:
        break
net.load_state_dict(best_state)
test_loss, test_acc = measure("test")
if RANK == 0:
    print(f"stopped after epoch {epoch} best valid {best:.10f} test {test_loss:.10f} acc {test_acc:.6f}")
if DISTRIBUTED:
    dist.destroy_process_group()
