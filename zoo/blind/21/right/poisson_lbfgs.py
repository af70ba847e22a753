"""Poisson regression on random Fourier features with full-batch L-BFGS; rows are divided over ranks."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

ROWS, FEATURES, RIDGE = 701, 40, 0.02


def counts():
    g = torch.Generator().manual_seed(70)
    x = torch.rand(ROWS, 3, generator=g) * 4
    rate = torch.exp(0.6 * torch.sin(2 * x[:, 0]) + 0.4 * torch.cos(x[:, 1] * x[:, 2]))
    y = torch.poisson(rate, generator=g)
    exposure = 0.5 + torch.rand(ROWS, generator=g)
    omega = torch.randn(3, FEATURES, generator=g)
    shift = 6.2832 * torch.rand(FEATURES, generator=g)
    return (x @ omega + shift).cos() * (2 / FEATURES) ** 0.5, y, exposure


class LogRate(nn.Module):
    def __init__(self):
        super().__init__()
        self.coef = nn.Parameter(torch.zeros(FEATURES))
        self.bias = nn.Parameter(torch.zeros(()))

    def forward(self, phi):
        return phi @ self.coef + self.bias


class Objective:
    def __init__(self, model, opt, rows, rank, world):
        phi, y, w = rows
        self.total = w.sum()
        low, high = rank * ROWS // world, (rank + 1) * ROWS // world
        self.phi, self.y, self.w = phi[low:high], y[low:high], w[low:high]
        self.model, self.opt, self.world, self.calls = model, opt, world, 0

    def __call__(self):
        self.calls += 1
        self.opt.zero_grad()
        eta = self.model(self.phi)
        loss = (self.w * (eta.exp() - self.y * eta)).sum() / self.total
        loss.backward()
        loss = loss.detach()
        if self.world > 1:
            dist.all_reduce(loss)
            for p in self.model.parameters():
                dist.all_reduce(p.grad)
        with torch.no_grad():
            loss = loss + 0.5 * RIDGE * self.model.coef.square().sum()
            self.model.coef.grad.add_(self.model.coef, alpha=RIDGE)
        return loss


def deviance(model, rows):
    phi, y, w = rows
    with torch.no_grad():
        mu = model(phi).exp()
        term = torch.where(y > 0, y * (y.clamp(min=1) / mu).log(), torch.zeros_like(y)) - (y - mu)
        return (2 * (w * term).sum() / w.sum()).item()


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    rows = counts()
    model = LogRate()
    opt = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=4, history_size=8, line_search_fn="strong_wolfe")
    objective = Objective(model, opt, rows, rank, world)
    before = None
    for outer in range(8):
        loss = opt.step(objective)
        loss = float(loss)
        if rank == 0:
            print(f"round {outer} objective {loss:.5f}")
        if before is not None and before - loss < 1e-4:
            break
        before = loss
    value = torch.zeros(1)
    if rank == 0:
        value[0] = deviance(model, rows)
    if world > 1:
        dist.broadcast(value, src=0)
    if rank == 0:
        print(f"deviance {value.item():.5f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
