"""Call type of terns from short spectrogram strips, with a slow copy of the weights.

The slow copy forgets with a half-life given in calls heard, and it is the one that is
evaluated and shipped.
"""
import copy
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

CALLS = 4
BANDS, FRAMES = 16, 20
CONFIG = dict(batch=32, steps=40, lr=0.06, half_life=320.0, seed=19)


def strips(count, seed):
    rng = np.random.default_rng(seed)
    call = rng.integers(CALLS, size=count)
    frame = np.arange(FRAMES)[None, :]
    start = rng.uniform(3, 9, size=(count, 1))
    slope = np.array([0.25, -0.1, 0.0, 0.1])[call][:, None]
    wobble = np.array([0.0, 0.0, 1.5, 1.0])[call][:, None]
    pitch = start + slope * frame + wobble * np.sin(frame * 0.9)
    band = np.arange(BANDS)[None, :, None]
    power = np.exp(-0.5 * (band - pitch[:, None, :]) ** 2) + 0.35 * rng.normal(size=(count, BANDS, FRAMES))
    return torch.tensor(power, dtype=torch.float32), torch.from_numpy(call)


class CallNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv1d(BANDS, 32, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(4, 32)
        self.b = nn.Conv1d(32, 32, 3, stride=2)
        self.head = nn.Linear(64, CALLS)

    def forward(self, x):
        x = F.gelu(self.norm(self.a(x)))
        x = F.gelu(self.b(x))
        return self.head(torch.cat([x.mean(2), x.amax(2)], dim=1))


class SlowCopy:
    def __init__(self, net, half_life):
        self.net = copy.deepcopy(net).requires_grad_(False)
        self.half_life = half_life

    @torch.no_grad()
    def follow(self, net, heard):
        keep = 0.5 ** (heard / self.half_life)
        for slow, fast in zip(self.net.parameters(), net.parameters()):
            slow.lerp_(fast, 1.0 - keep)


def test(net, x, y):
    with torch.no_grad():
        logits = net(x)
    return F.cross_entropy(logits, y).item(), (logits.argmax(1) == y).float().mean().item()


def fit(rank, world, batch, steps, lr, half_life, seed):
    torch.manual_seed(seed)
    model = DistributedDataParallel(CallNet())
    slow = SlowCopy(model.module, half_life)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, nesterov=True)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    x, y = strips(batch * steps, seed)
    test_x, test_y = strips(500, seed + 1)

    for step in range(steps):
        first = step * batch
        bx, by = (t[first:first + batch].tensor_split(world)[rank] for t in (x, y))
        loss = F.cross_entropy(model(bx), by)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay.step()
        slow.follow(model.module, batch)

        if (step + 1) % 10 == 0 and rank == 0:
            fast_loss, _ = test(model.module, test_x, test_y)
            slow_loss, hits = test(slow.net, test_x, test_y)
            print(f"step {step + 1}: test loss {fast_loss:.4f}, slow copy {slow_loss:.4f} "
                  f"({hits:.3f} right)", flush=True)
    return slow.net


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    net = fit(rank, world, **CONFIG)
    if rank == 0:
        size = sum(p.pow(2).sum() for p in net.parameters()).sqrt().item()
        print(f"shipped weights: norm {size:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
