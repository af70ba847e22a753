"""Heathland cover from reflectance: MLP with optimizer states dealt over the processes.

Each trainable tensor has one owner, which alone keeps Adam moments for it,
updates it, and sends the new value to the others (ZeRO stage 1 by hand).
The band calibration was measured in the field and stays fixed.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn

BANDS = 9


class Calibration(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.8, 1.2, n), requires_grad=False)

    def forward(self, h):
        return h * self.gain


class CoverNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(BANDS, 32)
        self.hidden = nn.Linear(32, 32)
        self.calibration = Calibration(32)
        self.squeeze = nn.Linear(32, 12)
        self.out = nn.Linear(12, 1)

    def forward(self, x):
        h = torch.tanh(self.embed(x))
        h = self.calibration(torch.tanh(self.hidden(h)))
        return self.out(torch.relu(self.squeeze(h))).squeeze(-1)


class OwnedAdam:
    def __init__(self, model, lr, rank, world):
        self.model, self.rank, self.world = model, rank, world
        trainable = [p for p in model.parameters() if p.requires_grad]
        self.trainable = trainable
        owned = [p for i, p in enumerate(trainable) if i % world == rank]
        self.inner = torch.optim.Adam(owned, lr=lr)

    def zero_grad(self):
        for p in self.trainable:
            p.grad = None

    @torch.no_grad()
    def step(self):
        for p in self.trainable:
            dist.all_reduce(p.grad)
            p.grad /= self.world
        self.inner.step()
        for i, p in enumerate(self.model.parameters()):
            dist.broadcast(p, src=i % self.world)


def heath(n, seed):
    g = torch.Generator().manual_seed(seed)
    cover = torch.rand(n, generator=g)
    soil = 0.2 + 0.1 * torch.randn(n, generator=g)
    base = torch.linspace(0.1, 0.6, BANDS)
    x = cover[:, None] * base.sin() + (1 - cover[:, None]) * soil[:, None] * base.flip(0)
    x = x + 0.03 * torch.randn(n, BANDS, generator=g)
    return (x - 0.2) * 5, cover


def main():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29702")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(64)
    net = CoverNet()
    opt = OwnedAdam(net, lr=6e-3, rank=rank, world=world)
    x, y = heath(1200, seed=1)
    x_test, y_test = heath(300, seed=2)
    draw = torch.Generator().manual_seed(65)

    for step in range(1, 51):
        rows = torch.randint(0, len(x), (60,), generator=draw)[rank::world]
        loss = nn.functional.huber_loss(net(x[rows]), y[rows], delta=0.5)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 10 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"{step} huber {shown.item() / world:.6f}")

    with torch.no_grad():
        rmse = (net(x_test) - y_test).pow(2).mean().sqrt().item()
    if rank == 0:
        print(f"cover rmse {rmse:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
