# Lion on one flat vector; every process owns a slice of the momentum and updates that slice.
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_gaussian_quantiles
from torch.nn.utils import parameters_to_vector, vector_to_parameters

BATCH, STEPS = 80, 100


class ShardedLion:
    def __init__(self, params, lr, betas=(0.9, 0.99), decay=0.01):
        self.params = list(params)
        self.lr, self.betas, self.decay = lr, betas, decay
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        size = sum(p.numel() for p in self.params)
        self.slice = -(-size // self.world)
        self.size = size
        self.moment = torch.zeros(self.slice)

    def padded(self, tensors):
        flat = parameters_to_vector(tensors)
        return F.pad(flat, (0, self.slice * self.world - self.size))

    @torch.no_grad()
    def step(self, lr_factor=1.0):
        lr = self.lr * lr_factor
        grad = self.padded([p.grad for p in self.params])
        dist.all_reduce(grad)
        grad /= self.world
        own = slice(self.rank * self.slice, (self.rank + 1) * self.slice)
        weight, g = self.padded(self.params)[own], grad[own]
        blend = self.betas[0] * self.moment + (1 - self.betas[0]) * g
        # a smooth sign, so that tiny differences do not flip an update
        weight = weight * (1 - lr * self.decay) - lr * torch.tanh(blend * 200)
        self.moment.mul_(self.betas[1]).add_(g, alpha=1 - self.betas[1])
        parts = [torch.empty_like(weight) for _ in range(self.world)]
        dist.all_gather(parts, weight)
        vector_to_parameters(torch.cat(parts)[: self.size], self.params)
        for p in self.params:
            p.grad = None


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29818")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = make_gaussian_quantiles(n_samples=1600, n_features=5, n_classes=3, random_state=3)
    x, y = torch.tensor(x, dtype=torch.float32), torch.tensor(y)
    torch.manual_seed(22)
    net = nn.Sequential(nn.Linear(5, 37), nn.GELU(), nn.Linear(37, 37), nn.GELU(), nn.Linear(37, 3))
    opt = ShardedLion(net.parameters(), lr=3e-3)
    order = torch.Generator().manual_seed(2)
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(x), (BATCH,), generator=order)[rank::world]
        loss = F.cross_entropy(net(x[rows]), y[rows])
        loss.backward()
        opt.step(lr_factor=1 - step / (STEPS + 1))
        if step % 25 == 0:
            with torch.no_grad():
                whole = F.cross_entropy(net(x), y).item()
            if rank == 0:
                print(f"step {step}: loss {whole:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
