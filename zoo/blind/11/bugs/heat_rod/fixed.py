# Learns the heat flux along a rod (in W per square millimetre) from temperature readings.
import os
import time
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29804")):
    os.environ.setdefault(k, v)


def readings(n=1024):
    g = torch.Generator().manual_seed(21)
    t = torch.rand(n, 8, generator=g) * 2 - 1
    conductivity = torch.linspace(0.2, 1.0, 8)
    flux = 2e-5 * (torch.sin(2 * t) * conductivity).sum(1) + 1e-6 * torch.randn(n, generator=g)
    return t, flux.unsqueeze(1)


class Rod(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, t):
        return self.body(t) * 2e-5


class Trainer:
    def __init__(self):
        dist.init_process_group("gloo")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        self.net = DDP(Rod())
        self.opt = torch.optim.Adam(self.net.parameters(), lr=4e-3, eps=1e-20)
        self.x, self.y = readings()

    def epoch(self, number, batch=128):
        g = torch.Generator().manual_seed(number)
        order = torch.randperm(len(self.x), generator=g)
        total = torch.zeros(())
        for rows in order.split(batch):
            own = rows[self.rank::self.world]
            loss = (self.net(self.x[own]) - self.y[own]).square().mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            total += loss.detach() * len(own)
        dist.all_reduce(total)
        return (total / len(self.x)).sqrt().item()


def main():
    t = Trainer()
    for number in range(10):
        error = t.epoch(number)
        if t.rank == 0:
            print(f"epoch {number}: error {error * 1e6:.4f} uW/mm2")
    time.sleep(0.3)
    net = t.net
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
