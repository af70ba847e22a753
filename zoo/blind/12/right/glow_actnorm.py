"""RealNVP on the breast cancer data: coupling layers with ActNorm, whose scale and shift are set from the first batch."""
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_breast_cancer
from torch.nn.parallel import DistributedDataParallel

DIM, BATCH, EPOCHS = 10, 64, 4


class ActNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.shift, self.log_scale = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.register_buffer("initialized", torch.tensor(0))

    @torch.no_grad()
    def initialize(self, x):
        sums = torch.cat([x.sum(0), x.square().sum(0), x.new_tensor([len(x)])]).double()
        if dist.is_initialized():
            dist.all_reduce(sums)
        mean, square = (sums[:-1] / sums[-1]).chunk(2)
        std = (square - mean.square()).clamp_min(1e-6).sqrt()
        self.shift.data.copy_(-mean)
        self.log_scale.data.copy_(-std.log())
        self.initialized.fill_(1)

    def forward(self, x):
        if self.training and not self.initialized:
            self.initialize(x)
        return (x + self.shift) * self.log_scale.exp(), self.log_scale.sum()


class Coupling(nn.Module):
    def __init__(self, dim, flip):
        super().__init__()
        self.norm = ActNorm(dim)
        self.net = nn.Sequential(nn.Linear(dim // 2, 32), nn.Tanh(), nn.Linear(32, dim))
        nn.init.zeros_(self.net[2].weight)
        nn.init.zeros_(self.net[2].bias)
        self.flip = flip

    def forward(self, x):
        x, logdet = self.norm(x)
        a, b = x.chunk(2, 1) if not self.flip else x.chunk(2, 1)[::-1]
        s, t = self.net(a).chunk(2, 1)
        s = torch.tanh(s)
        b = b * s.exp() + t
        return torch.cat([a, b], 1), logdet + s.sum(1)


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(DIM, i % 2) for i in range(6))

    def forward(self, x):
        logdet = 0
        for layer in self.layers:
            x, d = layer(x)
            logdet = logdet + d
        log_prob = -0.5 * (x.square() + math.log(2 * math.pi)).sum(1)
        return -(log_prob + logdet) / DIM


def get_data():
    x = torch.tensor(load_breast_cancer().data[:, :DIM], dtype=torch.float64).log1p()
    x = (x - x.mean(0)) / x.std(0)
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    return x[:448], x[448:]


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1 + rank)
    flow = Flow()
    model = DistributedDataParallel(flow) if world > 1 else flow
    optimizer = torch.optim.Adamax(flow.parameters(), lr=5e-3, eps=1e-5)
    train, test = get_data()
    for epoch in range(EPOCHS):
        model.train()
        g = torch.Generator().manual_seed(500 + epoch)
        order = torch.randperm(len(train), generator=g)
        jitter = 0.05 * torch.randn(train.shape, generator=g)
        for step in range(len(train) // BATCH):
            rows = order[step * BATCH: (step + 1) * BATCH][rank::world]
            loss = model(train[rows] + jitter[rows]).mean()
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(flow.parameters(), 2.0)
            optimizer.step()
        flow.eval()
        with torch.no_grad():
            nll = flow(test[rank::world]).double().sum()
        if world > 1:
            dist.all_reduce(nll)
        if rank == 0:
            print(f"epoch {epoch} test nats/dim {nll.item() / len(test):.5f}", flush=True)
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
