"""Match the upper and the lower half of a digit (contrastive, negatives from the whole batch)."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, STEPS = 64, 100


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))

    def forward(self, x):
        return F.normalize(self.net(x), dim=-1)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.upper, self.lower = Tower(), Tower()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.upper(x[:, :32]), self.lower(x[:, 32:]), self.scale.exp()


@torch.no_grad()
def collect(t, world):
    parts = [torch.empty_like(t) for _ in range(world)]
    dist.all_gather(parts, t.contiguous())
    return parts


def clip_loss(a, b, scale):
    logits = scale * a @ b.T
    target = torch.arange(len(a))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2


def main():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29858")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x = torch.tensor(load_digits().data / 16, dtype=torch.float32)
    torch.manual_seed(101)
    model = DDP(Pair())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    gen = torch.Generator().manual_seed(102)
    for step in range(1, STEPS + 1):
        rows = torch.randperm(1500, generator=gen)[:BATCH].chunk(world)[rank]
        a, b, scale = model(x[rows])
        all_a, all_b = collect(a, world), collect(b, world)
        all_a[rank], all_b[rank] = a, b
        # each process differentiates its own rows only, DDP takes the mean of these parts of one sum;
        # the temperature is differentiated by everybody
        scale = scale / world + scale.detach() * (1 - 1 / world)
        loss = clip_loss(torch.cat(all_a), torch.cat(all_b), scale)
        opt.zero_grad()
        (loss * world).backward()
        opt.step()
        if rank == 0 and step % 20 == 0:
            print(f"step {step} loss {loss.item():.5f} temperature {model.module.scale.item():.5f}")

    with torch.no_grad():
        a, b, _ = model.module(x[1500:1700])
        hit = ((a @ b.T).argmax(1) == torch.arange(200)).float().mean()
    if rank == 0:
        print(f"retrieval {hit.item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
