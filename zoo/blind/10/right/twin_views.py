"""Contrastive learning of two views of a digit; negatives come from all processes."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP

BATCH, STEPS, HEAT = 64, 60, 0.2


def gather(z):
    parts = [torch.empty_like(z) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, z.detach())
    parts[dist.get_rank()] = z
    return torch.cat(parts)


def contrast(a, b):
    """Symmetric loss over all pairs of the global batch."""
    a, b = F.normalize(gather(a), dim=1), F.normalize(gather(b), dim=1)
    scores = a @ b.t() / HEAT
    own = torch.arange(len(a))
    return (F.cross_entropy(scores, own) + F.cross_entropy(scores.t(), own)) / 2


def view(x, rows, step, salt):
    """Noise and erased pixels; drawn for every row by its number and the step."""
    out = []
    for r in rows.tolist():
        g = torch.Generator().manual_seed(step * 100_003 + r * 2 + salt)
        keep = (torch.rand(64, generator=g) > 0.2).float()
        out.append(x[r] * keep + 0.1 * torch.randn(64, generator=g))
    return torch.stack(out)


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29806")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, _ = load_digits(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32) / 16
    torch.manual_seed(5)
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)))
    opt = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    order = torch.Generator().manual_seed(6)
    for step in range(1, STEPS + 1):
        rows = torch.randperm(len(x), generator=order)[:BATCH].chunk(world)[rank]
        both = model(torch.cat([view(x, rows, step, 0), view(x, rows, step, 1)]))
        loss = contrast(*both.chunk(2))
        opt.zero_grad()
        (loss * world).backward()
        opt.step()
        if rank == 0 and step % 15 == 0:
            print(f"step {step}: loss {loss.item():.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
