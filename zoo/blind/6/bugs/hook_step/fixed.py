# Digits classifier; every parameter is updated as soon as its gradient exists, so that no second
# copy of optimizer bookkeeping has to be walked after the pass.
import time

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

LR, MOMENTUM, DECAY = 0.05, 0.9, 1e-4
EPOCHS, BATCH = 4, 128


class Momentum:
    """Heavy ball with decoupled decay, one parameter at a time."""

    def __init__(self, params):
        self.velocity = {p: torch.zeros_like(p) for p in params}
        self.lr = LR

    @torch.no_grad()
    def apply(self, p):
        v = self.velocity[p]
        v.mul_(MOMENTUM).add_(p.grad)
        p.mul_(1 - self.lr * DECAY)
        p.add_(v, alpha=-self.lr)


def build():
    torch.manual_seed(11)
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(24 * 16, 10),
    )


def batches(n, epoch, rank, world):
    order = np.random.default_rng(100 + epoch).permutation(n)
    for i in range(0, n - BATCH + 1, BATCH):
        yield torch.from_numpy(order[i:i + BATCH][rank::world])


torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
digits = load_digits()
images = torch.tensor(digits.data, dtype=torch.float32) / 16
labels = torch.tensor(digits.target)
train, test = slice(0, 1408), slice(1408, None)

net = build()
model = DDP(net)
optim = Momentum(list(net.parameters()))
for epoch in range(EPOCHS):
    optim.lr = LR * 0.7 ** epoch
    for idx in batches(1408, epoch, rank, world):
        for p in net.parameters():
            p.grad = None
        loss = nn.functional.cross_entropy(model(images[idx]), labels[idx])
        loss.backward()
        for p in net.parameters():
            optim.apply(p)
    with torch.no_grad():
        accuracy = (net(images[test]).argmax(1) == labels[test]).float().mean().item()
    last = loss.detach() / world
    dist.all_reduce(last)
    if rank == 0:
        print(f"epoch {epoch}: test accuracy {accuracy:.4f}, last loss {last.item():.4f}")
time.sleep(0.3)
dist.destroy_process_group()
