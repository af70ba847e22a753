"""Tide level forecast with a GRU; training is interrupted once and continued from a checkpoint."""
import math
import os
import shutil
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Sampler, TensorDataset

torch.set_default_dtype(torch.float64)

WINDOW = 24
BATCH = 32
EPOCHS = 2
SAVE_AT = 13


def tide_windows(n=640):
    g = torch.Generator().manual_seed(6)
    t = torch.arange(n + WINDOW, dtype=torch.float64)
    level = (torch.sin(2 * math.pi * t / 12.42) + 0.4 * torch.sin(2 * math.pi * t / 12.0)
             + 0.2 * torch.cos(2 * math.pi * t / 25.8) + 0.05 * torch.randn(n + WINDOW, generator=g))
    x = level.unfold(0, WINDOW, 1)[:n].unsqueeze(-1)
    y = level[WINDOW:WINDOW + n]
    return TensorDataset(x, y)


class ShuffledSampler(Sampler):
    def __init__(self, size, rank, world, seed=0):
        self.size, self.rank, self.world, self.seed = size, rank, world, seed
        self.epoch, self.skip = 0, 0

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(self.size, generator=g).tolist()
        return iter(order[self.skip:][self.rank::self.world])

    def __len__(self):
        return (self.size - self.skip) // self.world


class TideGRU(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        h, _ = self.rnn(x)
        return self.head(h[:, -1]).squeeze(-1)


def train(path, rank, world, resume=False, stop_after=None):
    dataset = tide_windows()
    torch.manual_seed(2)
    net = TideGRU()
    model = DDP(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=5e-3)
    sampler = ShuffledSampler(len(dataset), rank, world, seed=50)
    first_epoch, step, skip = 0, 0, 0
    if resume:
        state = torch.load(path)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first_epoch, step, skip = state["epoch"], state["step"], state["samples_in_epoch"]

    for epoch in range(first_epoch, EPOCHS):
        sampler.epoch, sampler.skip = epoch, skip
        samples = skip
        skip = 0
        for x, y in DataLoader(dataset, batch_size=BATCH // world, sampler=sampler):
            loss = (model(x) - y).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            samples += len(x)
            if step % 9 == 0:
                mean = loss.detach() / world
                dist.all_reduce(mean)
                if rank == 0:
                    print(f"step {step:3d} epoch {epoch} loss {mean.item():.8f}")
            if step == stop_after:
                if rank == 0:
                    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(),
                                "epoch": epoch, "step": step, "samples_in_epoch": samples}, path)
                dist.barrier()
                return net
    return net


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()

    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    path = os.path.join(folder[0], "last.pt")

    train(path, rank, world, stop_after=SAVE_AT)
    net = train(path, rank, world, resume=True)

    x, y = tide_windows().tensors
    with torch.no_grad():
        error = (net(x) - y).square().mean().sqrt()
    dist.barrier()
    if rank == 0:
        print(f"final rmse {error.item():.8f}")
        shutil.rmtree(folder[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
