# No wrapper: parameters are broadcast once, gradients are summed by hand and divided by the number of samples in the whole batch.
import argparse

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.lerp(p.grad, m, b1).sign_(), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - b2)


def sum_gradients(params, count):
    grads = [p.grad for p in params]
    flat = torch.cat([_flatten_dense_tensors(grads), torch.tensor([float(count)])])
    dist.all_reduce(flat)
    flat = flat[:-1] / flat[-1]
    for g, new in zip(grads, _unflatten_dense_tensors(flat, grads)):
        g.copy_(new)


def gather_uneven(t, world):
    sizes = [torch.zeros(1, dtype=torch.long) for _ in range(world)]
    dist.all_gather(sizes, torch.tensor([len(t)]))
    longest = int(max(sizes))
    padded = torch.zeros(longest, dtype=t.dtype)
    padded[:len(t)] = t
    out = [torch.empty_like(padded) for _ in range(world)]
    dist.all_gather(out, padded)
    return torch.cat([o[:int(s)] for o, s in zip(out, sizes)])


ap = argparse.ArgumentParser()
ap.add_argument("--global-batch", type=int, default=75)
ap.add_argument("--epochs", type=int, default=2)
args = ap.parse_args()
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target >= 5, dtype=torch.float32)
n_train = 1210

torch.manual_seed(20 + rank)
net = nn.Sequential(nn.Linear(64, 80), nn.LeakyReLU(0.1), nn.Linear(80, 80), nn.LeakyReLU(0.1), nn.Linear(80, 1))
for p in net.parameters():
    dist.broadcast(p.data, src=0)
params = list(net.parameters())
opt = Lion(params, lr=2e-3, weight_decay=0.02)
loss_fn = nn.BCEWithLogitsLoss(reduction="sum")

for epoch in range(args.epochs):
    order = np.random.RandomState(epoch).permutation(n_train)
    for begin in range(0, n_train, args.global_batch):
        part = np.array_split(order[begin:begin + args.global_batch], world)[rank]
        loss = loss_fn(net(x[part]).squeeze(1), y[part])
        opt.zero_grad()
        loss.backward()
        sum_gradients(params, len(part))
        opt.step()
    mine = np.array_split(np.arange(n_train, len(x)), world)[rank]
    with torch.no_grad():
        score = net(x[mine]).squeeze(1)
    scores, truth = gather_uneven(score, world), gather_uneven(y[mine], world)
    if rank == 0:
        print(f"epoch {epoch} auc {roc_auc_score(truth.numpy(), scores.numpy()):.4f} on {len(truth)} samples", flush=True)
dist.destroy_process_group()
