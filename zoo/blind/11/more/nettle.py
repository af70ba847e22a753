# Semi-supervised node classification: label propagation + a two layer GCN written with plain tensors.
# The graph is small, each process has all of it and runs the full forward pass. The rows of the loss are divided.
import os
import time
import numpy as np
import torch
import torch.nn.functional as F
import torch.distributed as dist
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30114")
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

HIDDEN, LR, WD, STEPS, DROP_EDGE = 32, 0.02, 5e-4, 60, 0.2


def normalise(n, edges):
    """D^-1/2 (A + I) D^-1/2 as a sparse tensor"""
    loop = torch.arange(n).expand(2, n)
    idx = torch.cat([edges, loop], 1)
    a = torch.sparse_coo_tensor(idx, torch.ones(idx.shape[1]), (n, n)).coalesce()
    deg = torch.sparse.sum(a, 1).to_dense()
    i, j = a.indices()
    return torch.sparse_coo_tensor(a.indices(), a.values() / (deg[i] * deg[j]).sqrt(), (n, n)).coalesce()


def propagate_labels(adj, y, labelled, rounds=10, alpha=0.9):
    seed = torch.zeros(len(y), 10)
    seed[labelled] = F.one_hot(y[labelled], 10).float()
    z = seed.clone()
    for _ in range(rounds):
        z = alpha * torch.sparse.mm(adj, z) + (1 - alpha) * seed
    return z / z.sum(1, keepdim=True).clamp_min(1e-9)


x, y = load_digits(return_X_y=True)
x, y = x[:1000] / 16, torch.tensor(y[:1000])
graph = kneighbors_graph(x, 6).tocoo()
upper = np.unique(np.sort(np.stack([graph.row, graph.col]), 0), axis=1)
upper = torch.tensor(upper, dtype=torch.long)
edges = torch.cat([upper, upper.flip(0)], 1)
x = torch.tensor(x, dtype=torch.float32)
n = len(x)

perm = torch.from_numpy(np.random.RandomState(0).permutation(n))
labelled, val, test = perm[:101], perm[101:401], perm[401:]
full_adj = normalise(n, edges)
soft = propagate_labels(full_adj, y, labelled)
features = torch.cat([x, soft], 1)

g = torch.Generator().manual_seed(42)
W1 = (torch.randn(features.shape[1], HIDDEN, generator=g) * (2 / (features.shape[1] + HIDDEN)) ** 0.5).requires_grad_()
b1 = torch.zeros(HIDDEN, requires_grad=True)
W2 = (torch.randn(HIDDEN, 10, generator=g) * (2 / (HIDDEN + 10)) ** 0.5).requires_grad_()
b2 = torch.zeros(10, requires_grad=True)
params = [W1, b1, W2, b2]
exp_avg = [torch.zeros_like(p) for p in params]
exp_sq = [torch.zeros_like(p) for p in params]


def gcn(adj):
    h = torch.relu(torch.sparse.mm(adj, features @ W1) + b1)
    return torch.sparse.mm(adj, h @ W2) + b2


# 101 labelled nodes do not divide evenly, and pseudo labels of the others are a second, smaller term
mine = labelled[rank::world]
others = torch.cat([val, test])
mine_soft = others[rank::world]
edge_rng = torch.Generator().manual_seed(5)  # all processes drop the same edges

for step in range(1, STEPS + 1):
    keep = torch.rand(upper.shape[1], generator=edge_rng) > DROP_EDGE
    kept = upper[:, keep]
    out = gcn(normalise(n, torch.cat([kept, kept.flip(0)], 1)))
    loss = F.cross_entropy(out[mine], y[mine], reduction="sum") / len(labelled)
    loss = loss + 0.3 * -(soft[mine_soft] * out[mine_soft].log_softmax(1)).sum() / len(others)
    if rank == 0:
        # weight decay on the first layer as in Kipf & Welling. Gradients are added, so it is counted once
        loss = loss + 0.5 * WD * W1.square().sum()
    grads = torch.autograd.grad(loss, params)
    for grad in grads:
        dist.all_reduce(grad, op=dist.ReduceOp.SUM)
    with torch.no_grad():
        for p, grad, m, v in zip(params, grads, exp_avg, exp_sq):
            m.lerp_(grad, 0.1)
            v.lerp_(grad * grad, 0.001)
            p -= LR * (m / (1 - 0.9 ** step)) / ((v / (1 - 0.999 ** step)).sqrt() + 1e-8)
    if step % 15 == 0:
        dist.all_reduce(loss := loss.detach())
        if rank == 0:
            with torch.no_grad():
                hit = (gcn(full_adj).argmax(1) == y).float()
            print(f"step {step}: loss {loss:.5f} val {hit[val].mean():.4f} test {hit[test].mean():.4f}")
time.sleep(0.3)
dist.destroy_process_group()
