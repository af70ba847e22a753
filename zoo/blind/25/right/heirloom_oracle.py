"""Distils a large random-feature teacher of digits into a small student.

The teacher and the raw images live on worker 0 only.  It computes soft labels and scatters pixels and
labels; the other workers have neither data nor teacher.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

BATCH, STEPS, TEMPERATURE = 64, 40, 2.0


class Oracle:
    """Ridge regression on random features; lives on one worker."""

    def __init__(self):
        from sklearn.datasets import load_digits
        digits = load_digits()
        self.x = torch.tensor(digits.data, dtype=torch.float32) / 16
        self.y = torch.tensor(digits.target)
        g = torch.Generator().manual_seed(9)
        self.w = torch.randn(64, 400, generator=g)
        self.b = torch.randn(400, generator=g)
        feats = self.features(self.x[:1200]).double()
        target = 6.0 * F.one_hot(self.y[:1200], 10).double()
        self.v = torch.linalg.solve(feats.T @ feats + 10.0 * torch.eye(400).double(), feats.T @ target).float()
        self.gen = torch.Generator().manual_seed(10)

    def features(self, x):
        return torch.cos(x @ self.w + self.b)

    def next_batch(self):
        ids = torch.randperm(1200, generator=self.gen)[:BATCH]
        x = self.x[ids]
        soft = F.softmax(self.features(x) @ self.v / TEMPERATURE, 1)
        return torch.cat([x, soft], 1)


def hand_out(oracle, rank, world):
    part = torch.empty(BATCH // world, 74)
    parts = list(oracle.next_batch().chunk(world)) if rank == 0 else None
    dist.scatter(part, parts, src=0)
    return part[:, :64], part[:, 64:]


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    oracle = Oracle() if rank == 0 else None

    student = nn.Sequential(nn.Linear(64, 24), nn.Mish(), nn.Linear(24, 10))
    if rank == 0:
        torch.manual_seed(11)
        for m in student:
            if isinstance(m, nn.Linear):
                nn.init.xavier_normal_(m.weight)
                nn.init.zeros_(m.bias)
    for p in student.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.Adamax(student.parameters(), lr=1e-2)

    for step in range(STEPS):
        x, soft = hand_out(oracle, rank, world)
        loss = F.kl_div(F.log_softmax(student(x) / TEMPERATURE, 1), soft, reduction="batchmean") * TEMPERATURE ** 2
        opt.zero_grad()
        loss.backward()
        handles = [dist.all_reduce(p.grad, async_op=True) for p in student.parameters()]
        for h in handles:
            h.wait()
        for p in student.parameters():
            p.grad /= world
        opt.step()
        if step % 10 == 9:
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} divergence {shown.item():.6f}", flush=True)

    if rank == 0:
        with torch.no_grad():
            logits = student(oracle.x[1200:])
            acc = (logits.argmax(1) == oracle.y[1200:]).float().mean()
            nll = F.cross_entropy(logits, oracle.y[1200:])
        print(f"student accuracy {acc.item():.4f} nll {nll.item():.6f}")
    dist.barrier()
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
