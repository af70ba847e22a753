"""Physics-informed net for Burgers' equation. Interior points are shared out, the rim is done by process 0.

Gradients are added up by hand. Points are drawn anew, more of them where the residual is large.
"""
import math

import torch
import torch.distributed as dist
import torch.nn as nn

VISCOSITY = 0.05
INTERIOR, RIM, CANDIDATES = 160, 40, 400
STEPS, REDRAW = 48, 12


class Net(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
                                    nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))
        self.slope = nn.Parameter(torch.ones(1))

    def forward(self, t, x):
        return self.layers(torch.stack([2 * t - 1, self.slope * x], 1)).squeeze(1)


def residual(net, points, create_graph=True):
    t, x = points[:, 0].clone().requires_grad_(), points[:, 1].clone().requires_grad_()
    u = net(t, x)
    ut, ux = torch.autograd.grad(u.sum(), (t, x), create_graph=True)
    (uxx,) = torch.autograd.grad(ux.sum(), x, create_graph=create_graph)
    return ut + u * ux - VISCOSITY * uxx


def rim_points(g):
    x = 2 * torch.rand(RIM // 2, generator=g, dtype=torch.float64) - 1
    t = torch.rand(RIM // 2, generator=g, dtype=torch.float64)
    side = torch.where(torch.arange(RIM // 2) % 2 == 0, -1.0, 1.0).double()
    points = torch.cat([torch.stack([torch.zeros_like(x), x], 1), torch.stack([t, side], 1)])
    return points, torch.cat([-torch.sin(math.pi * x), torch.zeros_like(t)])


def choose(net, g, rank, world):
    """Draw candidates, let every process judge its share, and keep points in proportion to the residual."""
    points = torch.rand(CANDIDATES, 2, generator=g, dtype=torch.float64) * torch.tensor([1.0, 2.0]) - torch.tensor([0.0, 1.0])
    size = torch.zeros(CANDIDATES, dtype=torch.float64)
    mine = slice(rank * CANDIDATES // world, (rank + 1) * CANDIDATES // world)
    size[mine] = residual(net, points[mine], create_graph=False).detach().abs()
    dist.all_reduce(size)
    key = (size + size.mean()).log() - torch.rand(CANDIDATES, generator=g, dtype=torch.float64).log().neg().log()
    keep = key.topk(INTERIOR).indices
    return points[keep]


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12 + rank)
    net = Net().double()
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    opt = torch.optim.Adam(net.parameters(), lr=8e-3)
    sched = torch.optim.lr_scheduler.StepLR(opt, 16, 0.6)
    g = torch.Generator().manual_seed(90)
    rim, values = rim_points(g)

    for step in range(STEPS):
        if step % REDRAW == 0:
            points = choose(net, g, rank, world)
        mine = points[rank::world]
        opt.zero_grad()
        inside = residual(net, mine).square().sum() / INTERIOR
        inside.backward()
        outside = torch.zeros((), dtype=torch.float64)
        if rank == 0:
            outside = 5 * (net(rim[:, 0], rim[:, 1]) - values).square().mean() + 1e-3 * (net.slope - 1).square().sum()
            outside.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        sched.step()
        if step % 8 == 7:
            parts = torch.stack([inside.detach(), outside.detach()])
            dist.reduce(parts, 0)
            if rank == 0:
                print(f"step {step + 1} equation {parts[0]:.5f} rim {parts[1]:.5f} slope {net.slope.item():.4f}")

    t = torch.linspace(0, 1, 51, dtype=torch.float64)
    x = torch.linspace(-1, 1, 51, dtype=torch.float64)
    grid = torch.cartesian_prod(t, x).tensor_split(world)[rank]
    worst = residual(net, grid, create_graph=False).detach().abs().max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if rank == 0:
        print(f"largest residual {worst.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
