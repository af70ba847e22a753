import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn

rank = int(os.environ.get("RANK", 0))
world = int(os.environ.get("WORLD_SIZE", 1))


class Solution(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))

    def forward(self, xy):
        return self.net(2 * xy - 1).squeeze(1)


def exact(xy):
    return torch.sin(math.pi * xy[:, 0]) * torch.sin(math.pi * xy[:, 1])


def laplacian(model, xy):
    xy = xy.clone().requires_grad_()
    u = model(xy)
    du = torch.autograd.grad(u.sum(), xy, create_graph=True)[0]
    total = torch.zeros_like(u)
    for k in range(2):
        total = total + torch.autograd.grad(du[:, k].sum(), xy, create_graph=True)[0][:, k]
    return total


def interior_points(n, round_):
    engine = torch.quasirandom.SobolEngine(2, scramble=True, seed=100 + round_)
    return engine.draw(n, dtype=torch.float64)


def boundary_points(n):
    t = torch.linspace(0, 1, n)
    zero, one = torch.zeros(n), torch.ones(n)
    return torch.cat([torch.stack(pair, dim=1) for pair in ((t, zero), (t, one), (zero, t), (one, t))])


def add_up(tensors):
    if world > 1:
        flat = torch.cat([t.reshape(-1) for t in tensors])
        dist.all_reduce(flat)
        for t, part in zip(tensors, flat.split([t.numel() for t in tensors])):
            t.copy_(part.view_as(t))


def make_closure(model, optimizer, inside, edge, history):
    mine = inside.tensor_split(world)[rank]

    def closure():
        optimizer.zero_grad()
        residual = laplacian(model, mine) + 2 * math.pi ** 2 * exact(mine)
        pde = residual.square().sum() / len(inside)
        rim = model(edge).square().mean()
        decay = sum(p.square().sum() for p in model.parameters())
        loss = pde + (200 * rim + 1e-7 * decay) / world
        loss.backward()
        total = loss.detach().clone()
        with torch.no_grad():
            add_up([total] + [p.grad for p in model.parameters()])
        history.append(total.item())
        return total

    return closure


@torch.no_grad()
def error(model):
    side = torch.linspace(0, 1, 41)
    grid = torch.cartesian_prod(side, side)
    return ((model(grid) - exact(grid)).norm() / exact(grid).norm()).item()


def main():
    torch.set_default_dtype(torch.float64)
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Solution()
    edge = boundary_points(20)
    history = []

    warm = torch.optim.Adam(model.parameters(), lr=5e-3)
    closure = make_closure(model, warm, interior_points(251, 0), edge, history)
    for _ in range(40):
        warm.step(closure)
    if rank == 0:
        print(f"adam      calls {len(history):4d} loss {history[-1]:.6f} error {error(model):.6f}")

    for round_ in range(1, 4):
        optimizer = torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=12, history_size=10, line_search_fn="strong_wolfe")
        closure = make_closure(model, optimizer, interior_points(251, round_), edge, history)
        optimizer.step(closure)
        if rank == 0:
            print(f"lbfgs {round_}   calls {len(history):4d} loss {history[-1]:.6f} error {error(model):.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
