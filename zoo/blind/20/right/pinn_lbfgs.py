"""A physics-informed network for a reaction-diffusion equation: Adam, then L-BFGS with a line search over all processes.

    u'' - 4 u^3 + f(x) = 0 on (0, 1),  u(0) = 0,  u(1) = 0,  exact solution sin(pi x) + x (1 - x)
"""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn

torch.set_default_dtype(torch.float64)
POINTS, SENSORS = 151, 7
ADAM_STEPS, LBFGS_ROUNDS = 60, 4
WEIGHT_BOUNDARY, WEIGHT_DATA = 20.0, 5.0


def exact(x):
    return torch.sin(math.pi * x) + x * (1 - x)


def source(x):
    return math.pi**2 * torch.sin(math.pi * x) + 2 + 4 * exact(x) ** 3


class Net(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(1, width), nn.Linear(width, width), nn.Linear(width, 1)])
        self.slope = nn.Parameter(torch.ones(2))

    def forward(self, x):
        for s, layer in zip(self.slope, self.layers[:-1]):
            x = torch.tanh(s * layer(x))
        return self.layers[-1](x)


class Problem:
    """The part of the loss that this process computes; all parts together are the loss."""

    def __init__(self, rank, world):
        self.world = world
        g = torch.Generator().manual_seed(2024)
        inside = torch.rand(POINTS, 1, generator=g)
        self.x = inside.tensor_split(world)[rank].clone().requires_grad_(True)
        self.boundary = torch.tensor([[0.0], [1.0]]) if rank == 0 else None
        where = torch.rand(SENSORS, 1, generator=g)
        noisy = exact(where) + 0.002 * torch.randn(SENSORS, 1, generator=g)
        self.where, self.measured = (where, noisy) if rank == world - 1 else (None, None)

    def loss(self, net):
        u = net(self.x)
        du = torch.autograd.grad(u.sum(), self.x, create_graph=True)[0]
        ddu = torch.autograd.grad(du.sum(), self.x, create_graph=True)[0]
        total = (ddu - 4 * u**3 + source(self.x)).square().sum() / POINTS
        if self.boundary is not None:
            total = total + WEIGHT_BOUNDARY * net(self.boundary).square().mean()
        if self.where is not None:
            total = total + WEIGHT_DATA * (net(self.where) - self.measured).square().mean()
        return total

    def closure(self, net, opt):
        def evaluate():
            opt.zero_grad()
            loss = self.loss(net)
            loss.backward()
            if self.world == 1:
                return loss.detach()
            params = list(net.parameters())
            flat = torch.cat([p.grad.reshape(-1) for p in params] + [loss.detach().reshape(1)])
            dist.all_reduce(flat)
            for p, g in zip(params, flat[:-1].split([p.numel() for p in params])):
                p.grad.copy_(g.view_as(p))
            return flat[-1]

        return evaluate


def relative_error(net):
    with torch.no_grad():
        x = torch.linspace(0, 1, 201)[:, None]
        return ((net(x) - exact(x)).norm() / exact(x).norm()).item()


def main():
    rank = int(os.environ.get("RANK", "0"))
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    net = Net()
    problem = Problem(rank, world)

    adam = torch.optim.Adam(net.parameters(), lr=5e-3)
    evaluate = problem.closure(net, adam)
    loss = None
    for _ in range(ADAM_STEPS):
        loss = adam.step(evaluate)
    if rank == 0:
        print(f"Adam: last loss {loss.item():.8f}  relative error {relative_error(net):.8f}")

    lbfgs = torch.optim.LBFGS(net.parameters(), max_iter=8, history_size=10, line_search_fn="strong_wolfe")
    evaluate = problem.closure(net, lbfgs)
    for round_ in range(LBFGS_ROUNDS):
        loss = lbfgs.step(evaluate)
        if rank == 0:
            print(f"L-BFGS {round_}: loss before {loss.item():.8f}  relative error {relative_error(net):.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
