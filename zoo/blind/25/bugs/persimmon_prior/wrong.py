"""Long-tailed digits with logit adjustment; the class prior is a running estimate kept in a buffer."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel

MOMENTUM = 0.8


class AdjustedClassifier(nn.Module):
    def __init__(self, n_classes=10, tau=1.0):
        super().__init__()
        self.features = nn.Sequential(nn.Linear(64, 56), nn.ReLU(), nn.Linear(56, 28), nn.ReLU())
        self.head = nn.Linear(28, n_classes)
        self.tau = tau
        self.register_buffer("prior", torch.full((n_classes,), 1.0 / n_classes))

    @torch.no_grad()
    def update_prior(self, labels):
        counts = torch.bincount(labels, minlength=len(self.prior)).float()
        self.prior.mul_(MOMENTUM).add_(counts / counts.sum(), alpha=1 - MOMENTUM)

    def forward(self, x, labels=None):
        logits = self.head(self.features(x))
        if labels is None:
            return logits
        self.update_prior(labels)
        return F.cross_entropy(logits + self.tau * torch.log(self.prior + 1e-3), labels)


def long_tail():
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y)
    keep = []
    for c in range(10):
        of_class = (y == c).nonzero().squeeze(1)
        keep.append(of_class[:max(12, int(120 * 0.75 ** c))])
    keep = torch.cat(keep)
    rest = torch.ones(len(y), dtype=torch.bool)
    rest[keep] = False
    return x[keep], y[keep], x[rest], y[rest]


def train(rank, world, steps=54, batch=32, lr=0.12):
    x, y, test_x, test_y = long_tail()
    torch.manual_seed(64)
    net = DistributedDataParallel(AdjustedClassifier())
    opt = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    gen = torch.Generator().manual_seed(65)
    part = slice(rank * batch // world, (rank + 1) * batch // world)
    for step in range(1, steps + 1):
        idx = torch.randperm(len(y), generator=gen)[:batch][part]
        loss = net(x[idx], y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 18 == 0:
            with torch.no_grad():
                logits = net.module(test_x)
            recalls = torch.stack([(logits.argmax(1)[test_y == c] == c).float().mean() for c in range(10)])
            if rank == 0:
                print(f"step {step:3d} balanced accuracy {recalls.mean():.4f} nll {F.cross_entropy(logits, test_y):.5f}")
    if rank == 0:
        print("prior", " ".join(f"{v:.4f}" for v in net.module.prior.tolist()))
    return net


if __name__ == "__main__":
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    trained = train(dist.get_rank(), dist.get_world_size())
    time.sleep(0.3)
    dist.destroy_process_group()
