"""Digits with a small conv net; every parameter has its own little optimizer, so that gradients need not be kept."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH = 64
EPOCHS = 2


class FusedSGD:
    """SGD with momentum, one parameter at a time; the gradient is freed at once."""

    def __init__(self, model, lr, momentum):
        self.lr, self.momentum = lr, momentum
        self.velocity = {p: torch.zeros_like(p) for p in model.parameters()}

    @torch.no_grad()
    def apply(self, p):
        v = self.velocity[p]
        v.mul_(self.momentum).add_(p.grad)
        p.sub_(v, alpha=self.lr)
        p.grad = None


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(1, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 16, 3, padding=1)
        self.out = nn.Linear(16 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(torch.tanh(self.a(x)), 2)
        x = F.max_pool2d(torch.tanh(self.b(x)), 2)
        return self.out(x.flatten(1))


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    train = TensorDataset(images[:1536], labels[:1536])
    sampler = DistributedSampler(train, shuffle=True, seed=11)
    loader = DataLoader(train, batch_size=GLOBAL_BATCH // world, sampler=sampler)

    torch.manual_seed(4)
    net = Net()
    model = DDP(net)
    fused = FusedSGD(net, lr=0.05, momentum=0.9)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        running = torch.zeros(())
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            for p in net.parameters():
                fused.apply(p)
            running += loss.detach()
        dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch}  loss {running.item() / world / len(loader):.5f}")

    if rank == 0:
        with torch.no_grad():
            right = (net(images[1536:]).argmax(1) == labels[1536:]).sum().item()
        print(f"test: {right} of {len(labels) - 1536}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
