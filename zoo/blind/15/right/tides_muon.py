"""Forecasting tides with a residual network, trained by Muon: each process orthogonalises the momenta of its own
matrices only and the finished updates are handed round (as in the speed-run code); vectors go to AdamW. float64.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_default_dtype(torch.float64)
PAST, AHEAD, BATCH, EPOCHS = 24, 6, 64, 4


def orthogonal(g, rounds=5):
    """Newton-Schulz iteration towards the nearest (half-)orthogonal matrix."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Muon(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.9, rank=0, world=1):
        super().__init__(sorted(params, key=lambda p: -p.numel()), dict(lr=lr, momentum=momentum))
        self.rank, self.world = rank, world

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for start in range(0, len(group["params"]), self.world):
                row = group["params"][start:start + self.world]
                pending = []
                for owner, p in enumerate(row):
                    update = torch.empty_like(p)
                    if owner == self.rank:                            # the momentum lives here and nowhere else
                        state = self.state[p]
                        if "momentum" not in state:
                            state["momentum"] = torch.zeros_like(p)
                        m = state["momentum"].lerp_(p.grad, 1 - group["momentum"])
                        update = orthogonal(p.grad.lerp(m, group["momentum"]))
                        update = (update * max(1, p.shape[0] / p.shape[1]) ** 0.5).contiguous()
                    work = dist.broadcast(update, owner, async_op=True) if self.world > 1 else None
                    pending.append((p, update, work))
                for p, update, work in pending:
                    if work is not None:
                        work.wait()
                    p.add_(update, alpha=-group["lr"])


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def tides(n, seed):
    g = torch.Generator().manual_seed(seed)
    t = torch.rand(n, 1, generator=g) * 700 + torch.arange(PAST + AHEAD)
    level = torch.sin(t * 0.5059) + 0.5 * torch.sin(t * 0.5236 + 1) + 0.3 * torch.sin(t * 0.2625) + 0.1 * torch.sin(t * 1.01)
    level = level + 0.05 * torch.randn(level.shape, generator=g)
    return TensorDataset(level[:, :PAST], level[:, PAST:])


def main():
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(rank + 70)
    train, test = tides(640, 1), tides(130, 2)
    sampler = DistributedSampler(train, world, rank, seed=3)
    loader = DataLoader(train, BATCH // world, sampler=sampler)
    net = nn.Sequential(nn.Linear(PAST, 32), Residual(32), Residual(32), nn.Linear(32, AHEAD))
    model = DDP(net) if world > 1 else net
    matrices = [p for p in net[1:3].parameters() if p.ndim == 2] + [net[0].weight]
    others = [p for p in net.parameters() if all(p is not m for m in matrices)]
    muon = Muon(matrices, rank=rank, world=world)
    adam = torch.optim.AdamW(others, lr=5e-3, eps=1e-8)
    schedules = [torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, EPOCHS * len(loader)) for o in (muon, adam)]
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        report = torch.zeros(2)
        for x, y in loader:
            loss = F.huber_loss(model(x), y, delta=0.5)
            net.zero_grad()
            loss.backward()
            muon.step()
            adam.step()
            for s in schedules:
                s.step()
            report[0] += loss.item() / len(loader) / world
        with torch.no_grad():
            x, y = (t[rank::world] for t in test.tensors)
            report[1] = (net(x) - y).square().sum() / (len(test) * AHEAD)
        if world > 1:
            dist.all_reduce(report)
        if rank == 0:
            print(f"epoch {epoch} train {report[0]:.6f} test {report[1]:.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
