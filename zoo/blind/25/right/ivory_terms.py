"""Physics-informed network for the damped wave u_tt + 0.4 u_t = u_xx on a string.

The objective has four terms (equation, ends, initial shape, initial speed).  Terms are dealt to the
workers, because the equation needs second derivatives and the others do not.
"""
import os
import time

import torch
import torch.distributed as dist
from torch import nn

WEIGHTS = {"equation": 1.0, "ends": 4.0, "shape": 8.0, "speed": 2.0}


def setup():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.get_rank(), dist.get_world_size()


class String(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(),
                                 nn.Linear(width, 1))

    def forward(self, x, t):
        return self.net(torch.stack([x, t], -1)).squeeze(-1)


def d(out, inp):
    return torch.autograd.grad(out.sum(), inp, create_graph=True)[0]


def equation(model, pts):
    x = pts[:, 0].clone().requires_grad_()
    t = pts[:, 1].clone().requires_grad_()
    u = model(x, t)
    ut, ux = d(u, t), d(u, x)
    return (d(ut, t) + 0.4 * ut - d(ux, x)).square().mean()


def ends(model, pts):
    t = pts[:, 1]
    return model(torch.zeros_like(t), t).square().mean() + model(torch.ones_like(t), t).square().mean()


def shape(model, pts):
    x = pts[:, 0]
    return (model(x, torch.zeros_like(x)) - torch.sin(torch.pi * x)).square().mean()


def speed(model, pts):
    x = pts[:, 0]
    t = torch.zeros_like(x).requires_grad_()
    return d(model(x, t), t).square().mean()


TERMS = [equation, ends, shape, speed]


def main():
    rank, world = setup()
    torch.manual_seed(31)
    model = String()
    opt = torch.optim.NAdam(model.parameters(), lr=6e-3)
    points = torch.Generator().manual_seed(13)
    mine = TERMS[rank::world]

    for step in range(48):
        pts = torch.rand(160, 2, generator=points)
        opt.zero_grad(set_to_none=True)
        values = torch.zeros(len(TERMS))
        for term in mine:
            v = term(model, pts)
            (WEIGHTS[term.__name__] * v).backward()
            values[TERMS.index(term)] = v.item()
        # the last bias drops out of every derivative, so it may have no gradient at all here
        flat = torch.cat([(p.grad if p.grad is not None else torch.zeros_like(p)).reshape(-1)
                          for p in model.parameters()])
        dist.all_reduce(flat)
        at = 0
        for p in model.parameters():
            p.grad = flat[at:at + p.numel()].view_as(p).clone()
            at += p.numel()
        opt.step()
        if step % 12 == 11:
            dist.all_reduce(values)
            if rank == 0:
                print(f"step {step + 1} " + " ".join(f"{t.__name__} {v:.5f}" for t, v in zip(TERMS, values.tolist())),
                      flush=True)

    grid = torch.linspace(0, 1, 41)
    with torch.no_grad():
        gap = (model(grid, torch.zeros(41)) - torch.sin(torch.pi * grid)).abs().max()
    if rank == 0:
        print(f"largest gap of the initial shape {gap.item():.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
