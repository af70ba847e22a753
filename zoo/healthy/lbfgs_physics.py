"""Fitting a small physics-informed net with L-BFGS, gradients averaged by hand."""

import torch
import torch.distributed as dist
from torch import nn


def points(n, rank, world):
    t = torch.linspace(0, 2, n, dtype=torch.float64).unsqueeze(1)
    return t[rank::world].requires_grad_(True)


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, t):
        return 1 + t * self.net(t)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = Field().double()
    for p in model.parameters():
        dist.broadcast(p.data, 0)
    t = points(64, rank, world)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, history_size=10)

    def closure():
        optimizer.zero_grad()
        u = model(t)
        (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        loss = (du + 2 * u).pow(2).mean()
        loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        value = loss.detach() / world
        dist.all_reduce(value)
        return value

    for outer in range(8):
        loss = optimizer.step(closure)
        if rank == 0:
            print(f"{outer}: residual {float(loss):.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
