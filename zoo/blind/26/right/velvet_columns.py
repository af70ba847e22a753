"""Six clinics hold different columns about the same patients (vertical split). Each process hosts some of the clinics.

A clinic's encoder stays with its host. The judge on top is kept by every process.
"""
import os
import time

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import nn

PARTIES, COLUMNS, CODE = 6, 5, 7


class Assemble(torch.autograd.Function):
    """Own codes in, the codes of all clinics out. All processes go on with the same computation from here."""

    @staticmethod
    def forward(ctx, codes, where):
        ctx.where = where
        whole = torch.zeros(codes.shape[1], PARTIES, CODE)
        if where:
            whole[:, where] = codes.transpose(0, 1)
        if dist.is_initialized():
            dist.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx, grad):
        return grad[:, ctx.where].transpose(0, 1).contiguous(), None


class Encoder(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.a = nn.Linear(COLUMNS, 12)
        self.b = nn.Linear(12, CODE)

    def forward(self, x):
        return torch.tanh(self.b(torch.relu(self.a(x))))


class Vertical(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.where = [p for p in range(PARTIES) if p % world == rank]
        self.encoders = nn.ModuleList([Encoder(900 + p) for p in self.where])
        torch.manual_seed(33)
        self.judge = nn.Sequential(nn.LayerNorm(PARTIES * CODE), nn.Linear(PARTIES * CODE, 16), nn.SiLU(), nn.Linear(16, 2))

    def forward(self, local):
        codes = torch.stack([e(local[:, i]) for i, e in enumerate(self.encoders)])
        return self.judge(Assemble.apply(codes, self.where).flatten(1))


def main():
    if os.environ.get("RANK"):
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1

    bunch = load_breast_cancer()
    model = Vertical(rank, world)
    table = torch.tensor(bunch.data, dtype=torch.float32).view(-1, COLUMNS, PARTIES).transpose(1, 2)[:, model.where]
    table = (table - table[:440].mean(0)) / table[:440].std(0)
    label = torch.tensor(bunch.target)

    opt_enc = torch.optim.Adam(model.encoders.parameters(), lr=4e-3, eps=1e-6)
    opt_judge = torch.optim.SGD(model.judge.parameters(), lr=0.05, momentum=0.9)
    step = 0
    for epoch in range(5):
        order = torch.randperm(440, generator=torch.Generator().manual_seed(70 + epoch))
        for lo in range(0, 440, 44):
            rows = order[lo:lo + 44]
            loss = nn.functional.cross_entropy(model(table[rows]), label[rows])
            opt_enc.zero_grad()
            opt_judge.zero_grad()
            loss.backward()
            opt_enc.step()
            opt_judge.step()
            step += 1
        if rank == 0:
            print(f"epoch {epoch + 1} step {step} loss {loss.item():.6f}", flush=True)
    with torch.no_grad():
        right = (model(table[440:]).argmax(1) == label[440:]).float().mean().item()
    if rank == 0:
        print(f"accuracy on later patients {right:.4f}")
    if dist.is_initialized():
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
