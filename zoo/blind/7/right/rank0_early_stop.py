"""Spiral classification; the first process validates and tells the others whether to go on."""
import copy
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def spirals(n, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % 3
    r = torch.rand(n, generator=g) * 0.9 + 0.1
    a = label * 2 * math.pi / 3 + 4 * r + 0.25 * torch.randn(n, generator=g)
    return torch.stack([r * a.cos(), r * a.sin()], 1), label


class Stopper:
    def __init__(self, patience):
        self.patience, self.best, self.bad, self.state = patience, math.inf, 0, None

    def __call__(self, value, net):
        if value < self.best - 2e-3:
            self.best, self.bad, self.state = value, 0, copy.deepcopy(net.state_dict())
        else:
            self.bad += 1
        return self.bad >= self.patience


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29715")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    x, y = spirals(960, 0)
    vx, vy = spirals(300, 1)
    data = TensorDataset(x, y)
    sampler = DistributedSampler(data, seed=21)
    loader = DataLoader(data, 48 // world, sampler=sampler)
    torch.manual_seed(13)
    net = nn.Sequential(nn.Linear(2, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, 3))
    model = DDP(net)
    opt = torch.optim.Adam(net.parameters(), lr=2e-2)
    stopper = Stopper(patience=3)
    for epoch in range(30):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(bx), by).backward()
            opt.step()
        stop = torch.zeros(1)
        if rank == 0:
            with torch.no_grad():
                value = nn.functional.cross_entropy(net(vx), vy).item()
            stop += stopper(value, net)
            print(f"epoch {epoch} validation {value:.5f} bad epochs {stopper.bad}")
        dist.broadcast(stop, 0)
        if stop.item():
            break
    if rank == 0:
        best = copy.deepcopy(net)
        best.load_state_dict(stopper.state)
        with torch.no_grad():
            acc = (best(vx).argmax(1) == vy).float().mean()
        print(f"stopped after {epoch + 1} epochs, best {stopper.best:.5f}, accuracy {acc:.4f}")
        torch.save(stopper.state, "best.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
