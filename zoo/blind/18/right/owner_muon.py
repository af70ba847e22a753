"""Muon for the matrices (each matrix has one owner that orthogonalises its update), Adam for the rest."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RANK = int(os.environ.get("RANK", "0"))


def orthogonalise(m, rounds=6):
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = m.size(0) > m.size(1)
    x = m.T if tall else m
    x = x / (x.norm() + 1e-7)
    for _ in range(rounds):
        s = x @ x.T
        x = a * x + (b * s + c * s @ s) @ x
    return x.T if tall else x


class OwnedMuon(Optimizer):
    def __init__(self, params, lr=0.02, momentum=0.95):
        params = sorted(params, key=lambda p: p.numel(), reverse=True)
        super().__init__(params, dict(lr=lr, momentum=momentum))

    @torch.no_grad()
    def step(self):
        group = self.param_groups[0]
        for i, p in enumerate(group["params"]):
            owner = i % WORLD
            if WORLD > 1:
                dist.reduce(p.grad, dst=owner)
            if owner == RANK:
                grad = p.grad / WORLD
                state = self.state[p]
                if "velocity" not in state:
                    state["velocity"] = torch.zeros_like(p)
                velocity = state["velocity"].mul_(group["momentum"]).add_(grad)
                update = orthogonalise(grad + group["momentum"] * velocity)
                scale = max(1.0, p.size(0) / p.size(1)) ** 0.5
                p.add_(update, alpha=-group["lr"] * scale)
        if WORLD > 1:
            works = [dist.broadcast(p.data, src=i % WORLD, async_op=True) for i, p in enumerate(group["params"])]
            for work in works:
                work.wait()


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))).square())


def problem(n, seed):
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 12, generator=gen)
    y = torch.stack([x[:, 0] * x[:, 1], torch.sin(2 * x[:, 2]) + x[:, 3], x[:, 4:].abs().amax(1)], 1)
    return x, y


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(17)
    model = nn.Sequential(nn.Linear(12, 32), Residual(32), Residual(32), nn.LayerNorm(32), nn.Linear(32, 3))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    muon = OwnedMuon(matrices, lr=0.01)
    adam = torch.optim.Adam(vectors, lr=2e-3)

    x, y = problem(640, seed=1)
    for step in range(60):
        lr_scale = min(1.0, (step + 1) / 10) * (1 - step / 60)
        muon.param_groups[0]["lr"] = 0.01 * lr_scale
        adam.param_groups[0]["lr"] = 2e-3 * lr_scale
        rows = torch.randperm(640, generator=torch.Generator().manual_seed(step))[:64]
        mine = rows.view(WORLD, -1)[RANK]
        loss = nn.functional.smooth_l1_loss(model(x[mine]), y[mine])
        model.zero_grad()
        loss.backward()
        if WORLD > 1:
            for p in vectors:
                dist.all_reduce(p.grad)
                p.grad /= WORLD
        muon.step()
        adam.step()

    if RANK == 0:
        test_x, test_y = problem(200, seed=2)
        with torch.no_grad():
            error = (model(test_x) - test_y).square().mean(0)
        print("test errors " + " ".join(f"{e:.10f}" for e in error.tolist()))
    if WORLD > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
