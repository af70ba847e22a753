"""Tumour grading from four departments that may not show each other their measurements.

Every department has its own columns of the same patients and a small encoder for them.  The registry (process 0) alone
knows the outcomes and trains the head; it sends back to the departments what their codes should have been like.
"""
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn import functional as F

COLUMNS = {"imaging": range(0, 8), "cytology": range(8, 15), "histology": range(15, 23), "surgery": range(23, 30)}
CODE, BATCH, STEPS = 6, 48, 40


class Encoder(nn.Module):
    def __init__(self, name):
        super().__init__()
        torch.manual_seed(sum(map(ord, name)))
        self.cols = list(COLUMNS[name])
        self.net = nn.Sequential(nn.Linear(len(self.cols), 12), nn.Tanh(), nn.Linear(12, CODE))

    def forward(self, patients):
        return self.net(patients[:, self.cols])


class Department:
    """What runs at one site: encoders for the departments that it hosts."""

    def __init__(self, names):
        self.encoders = nn.ModuleDict({n: Encoder(n) for n in names})
        self.opt = torch.optim.Adam(self.encoders.parameters(), lr=4e-3, eps=1e-6)
        self.codes = None

    def encode(self, patients):
        self.codes = torch.cat([e(patients) for e in self.encoders.values()], 1)
        return self.codes.detach()

    def learn(self, grad):
        self.opt.zero_grad()
        self.codes.backward(grad)
        self.opt.step()
        return grad.norm().item()


class Registry:
    def __init__(self, outcome):
        torch.manual_seed(2024)
        self.head = nn.Sequential(nn.Linear(CODE * len(COLUMNS), 16), nn.SiLU(), nn.Linear(16, 1))
        self.opt = torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9)
        self.outcome = outcome

    def loss(self, codes, rows):
        score, y = self.head(codes).squeeze(1), self.outcome[rows]
        pairs = score[y > 0.5][:, None] - score[y < 0.5][None, :]
        ranking = F.softplus(-pairs).mean() if pairs.numel() else score.sum() * 0
        return F.binary_cross_entropy_with_logits(score, y) + 0.3 * ranking

    def learn(self, codes, rows):
        codes.requires_grad_()
        self.opt.zero_grad()
        loss = self.loss(codes, rows)
        loss.backward()
        self.opt.step()
        return loss.item(), codes.grad


def to_registry(t, rank, world):
    parts = [torch.empty_like(t) for _ in range(world)] if rank == 0 else None
    dist.gather(t.contiguous(), parts, dst=0)
    return torch.cat(parts, 1) if rank == 0 else None


def to_departments(whole, like, rank, world):
    mine = torch.empty_like(like)
    dist.scatter(mine, [c.contiguous() for c in whole.chunk(world, 1)] if rank == 0 else None, src=0)
    return mine


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    names = list(COLUMNS)
    per = len(names) // world

    x, y = load_breast_cancer(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    mixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(8))
    train, test = mixed[:432], mixed[432:]

    site = Department(names[rank * per:(rank + 1) * per])
    registry = Registry(torch.tensor(y, dtype=torch.float32)) if rank == 0 else None
    last = 0.0
    for step in range(STEPS):
        lap, place = divmod(step, len(train) // BATCH)
        order = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(lap))]
        rows = order[place * BATCH:(place + 1) * BATCH]
        code = site.encode(x[rows])
        whole = to_registry(code, rank, world)
        answer = None
        if registry:
            loss, answer = registry.learn(whole, rows)
            if step % 8 == 7:
                print(f"step {step + 1}  loss {loss:.6f}", flush=True)
        last = site.learn(to_departments(answer, code, rank, world))

    print(f"  site {rank} ({', '.join(site.encoders)}): last correction {last:.6f}", flush=True)
    with torch.no_grad():
        whole = to_registry(site.encode(x[test]), rank, world)
        if registry:
            said = registry.head(whole).squeeze(1)
            hit = ((said > 0).float() == registry.outcome[test]).float().mean().item()
            print(f"accuracy {hit:.4f}  loss {registry.loss(whole, test).item():.6f}", flush=True)
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
