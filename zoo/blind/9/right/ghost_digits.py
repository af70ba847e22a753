"""Ghost batch norm: statistics over groups of 8 rows, which never span two processes."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

GROUP, GLOBAL, ROWS = 8, 64, 1536


class GhostNorm(nn.Module):
    def __init__(self, width, momentum=0.05):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))
        self.momentum = momentum

    def forward(self, x):
        if not self.training:
            return (x - self.mean) / (self.var + 1e-5).sqrt() * self.scale + self.shift
        g = x.view(-1, GROUP, x.shape[1])
        mean, var = g.mean(1, keepdim=True), g.var(1, unbiased=False, keepdim=True)
        with torch.no_grad():
            self.mean.lerp_(mean.mean(0)[0], self.momentum)
            self.var.lerp_(var.mean(0)[0], self.momentum)
        return ((g - mean) / (var + 1e-5).sqrt()).view_as(x) * self.scale + self.shift


def share_buffers(model, world):
    """Linear in the statistics, so averaging once before it is needed is enough."""
    for b in model.buffers():
        dist.all_reduce(b)
        b /= world


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29716")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 48), GhostNorm(48), nn.ReLU(), nn.Linear(48, 32), GhostNorm(32), nn.ReLU(),
                        nn.Linear(32, 10))
    model = DDP(net, broadcast_buffers=False)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(4):
        model.train()
        perm = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
        for block in perm.view(-1, world, GLOBAL // world):
            rows = block[rank]
            loss = F.cross_entropy(model(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
        share_buffers(net, world)
        model.eval()
        with torch.no_grad():
            out = net(x[ROWS:])
        if rank == 0:
            print(f"epoch {epoch} test {F.cross_entropy(out, y[ROWS:]).item():.5f} "
                  f"accuracy {(out.argmax(1) == y[ROWS:]).float().mean().item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
