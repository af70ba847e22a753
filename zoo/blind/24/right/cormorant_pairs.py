# Two towers (upper and lower half of a digit) trained with a symmetric InfoNCE.
# Embeddings are gathered from all processes; only my own slice carries a graph,
# and every process evaluates the complete loss.
import math
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
if WORLD > 1:
    dist.init_process_group("gloo")


class Tower(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(32, 48), nn.GELU(), nn.Linear(48, dim))

    def forward(self, x):
        return nn.functional.normalize(self.body(x), dim=-1)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.top, self.bottom = Tower(), Tower()
        self.log_scale = nn.Parameter(torch.tensor(math.log(8.0)))


def gather_with_mine(z):
    if WORLD == 1:
        return z
    parts = [torch.empty_like(z) for _ in range(WORLD)]
    dist.all_gather(parts, z.detach().contiguous())
    parts[RANK] = z
    return torch.cat(parts)


def sync(model):
    """Each rank holds d(full loss)/d(its own rows): these add up.
    The temperature sees the full loss everywhere: that one is a mean."""
    if WORLD == 1:
        return
    for name, p in model.named_parameters():
        dist.all_reduce(p.grad)
        if name == "log_scale":
            p.grad /= WORLD


images = load_digits().images.astype(np.float32) / 16
images = torch.from_numpy(images)
tops, bottoms = images[:, :4].reshape(-1, 32), images[:, 4:].reshape(-1, 32)

torch.manual_seed(3)
net = Pair()
optim = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.01)
rng = np.random.default_rng(7)
BATCH, STEPS = 64, 40
share = BATCH // WORLD
for step in range(STEPS):
    chosen = torch.from_numpy(rng.choice(1400, BATCH, replace=False))
    mine = chosen[RANK * share:(RANK + 1) * share]
    a = gather_with_mine(net.top(tops[mine]))
    b = gather_with_mine(net.bottom(bottoms[mine]))
    logits = net.log_scale.exp() * a @ b.T
    target = torch.arange(BATCH)
    loss = 0.5 * (nn.functional.cross_entropy(logits, target) + nn.functional.cross_entropy(logits.T, target))
    optim.zero_grad(set_to_none=True)
    loss.backward()
    sync(net)
    optim.step()
    with torch.no_grad():
        net.log_scale.clamp_(max=math.log(50.0))
    if RANK == 0 and step % 10 == 9:
        print(f"step {step + 1:3d} loss {loss.item():.5f} scale {net.log_scale.exp().item():.4f}")

# recall@1 among the held-out images, each process answers its share of the queries
with torch.no_grad():
    q, g = net.top(tops[1400:]), net.bottom(bottoms[1400:])
    own = torch.arange(RANK, len(q), WORLD)
    hits = torch.tensor([((q[own] @ g.T).topk(5).indices == own[:, None]).any(1).sum().item(), len(own)])
    if WORLD > 1:
        dist.all_reduce(hits)
if RANK == 0:
    print(f"recall@5 {hits[0].item() / hits[1].item():.4f} over {hits[1].item()} queries")
time.sleep(0.3)
if WORLD > 1:
    dist.destroy_process_group()
