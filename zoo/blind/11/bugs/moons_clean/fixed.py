import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import make_moons
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

for name, value in [("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29810")]:
    os.environ.setdefault(name, value)

ROWS, BATCH, EPOCHS = 1024, 128, 12


class Cleaner(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 2))

    def forward(self, x, level):
        return self.net(torch.cat([x, level], 1))


def preview(model, step_size=0.5):
    """Walks a handful of random points towards the moons and tells where they end."""
    x = 1.5 * torch.randn(32, 2, generator=torch.Generator().manual_seed(77))
    with torch.no_grad():
        for level in torch.linspace(0.9, 0.1, 9):
            x = x - step_size * level * model(x, level.expand(32, 1))
    return x.mean(0).tolist()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.tensor(make_moons(ROWS, noise=0.05, random_state=0)[0], dtype=torch.float32)
    data = (data - data.mean(0)) / data.std(0)

    torch.manual_seed(11)
    model = Cleaner()
    net = DDP(model)
    opt = torch.optim.Adam(net.parameters(), lr=3e-3)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    for epoch in range(EPOCHS):
        order = torch.randperm(ROWS)
        noise = torch.randn(ROWS, 2)
        level = torch.rand(ROWS, 1)
        total = torch.zeros(())
        for start in range(0, ROWS, BATCH):
            rows = order[start:start + BATCH][rank::world]
            guess = net(data[rows] + level[rows] * noise[rows], level[rows])
            loss = (guess - noise[rows]).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach()
        sched.step()
        dist.all_reduce(total)
        if rank == 0:
            a, b = preview(model)
            print(f"epoch {epoch:2d} loss {total.item() * BATCH / ROWS / world:.5f} preview {a:+.3f} {b:+.3f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
