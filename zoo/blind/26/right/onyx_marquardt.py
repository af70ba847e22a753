"""Fits a small network to a hysteresis curve with Levenberg-Marquardt; the residual rows are spread over the processes."""
import math
import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, jacrev, vmap

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
if "RANK" in os.environ:
    dist.init_process_group("gloo")


def total(t):
    if WORLD > 1:
        dist.all_reduce(t)
    return t


def curve(n=602, seed=11):
    g = torch.Generator().manual_seed(seed)
    h = torch.rand(n, 1, generator=g, dtype=torch.float64) * 4 - 2
    branch = (torch.rand(n, 1, generator=g, dtype=torch.float64) > 0.5).double() * 2 - 1
    m = torch.tanh(1.7 * h + 0.6 * branch) + 0.15 * torch.sin(3 * h)
    return torch.cat([h, branch], 1), m + 0.02 * torch.randn(n, 1, generator=g, dtype=torch.float64)


class Marquardt(torch.optim.Optimizer):
    """Damped Gauss-Newton. step() takes a function of the flat parameters that returns this process's residuals."""

    def __init__(self, params, damping=0.5, up=4.0, down=0.6):
        super().__init__(params, dict(damping=damping, up=up, down=down))

    @torch.no_grad()
    def step(self, residuals, jacobian):
        group = self.param_groups[0]
        flat = nn.utils.parameters_to_vector(group["params"])
        r, J = residuals(flat), jacobian(flat)
        normal = total(torch.cat([J.T @ J, (J.T @ r)[:, None]], 1))
        A, b = normal[:, :-1], normal[:, -1]
        now = total(r.square().sum())
        for _ in range(5):
            delta = torch.linalg.solve(A + group["damping"] * torch.diag(0.5 + A.diagonal()), b)
            then = total(residuals(flat - delta).square().sum())
            if then < now:
                nn.utils.vector_to_parameters(flat - delta, group["params"])
                group["damping"] = max(group["damping"] * group["down"], 0.02)
                return then.item()
            group["damping"] *= group["up"]
        return now.item()


def main():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 9), nn.Tanh(), nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 1))
    names = [n for n, _ in net.named_parameters()]
    shapes = [p.shape for p in net.parameters()]
    x, y = curve()
    # the first process has the smaller part: it also writes the log
    edges = [0] + [math.ceil(len(x) * (k + 1) * (k + 4) / (WORLD * (WORLD + 3))) for k in range(WORLD)]
    mine = slice(edges[RANK], edges[RANK + 1])
    mx, my = x[mine], y[mine]

    def unflatten(flat):
        parts = flat.split([s.numel() for s in shapes])
        return {n: p.view(s) for n, p, s in zip(names, parts, shapes)}

    def residuals(flat):
        return (functional_call(net, unflatten(flat), (mx,)) - my).squeeze(1)

    def single(flat, xi):
        return functional_call(net, unflatten(flat), (xi[None],)).squeeze()

    def jacobian(flat):
        return vmap(jacrev(single), in_dims=(None, 0))(flat, mx)

    opt = Marquardt(net.parameters())
    for it in range(24):
        sse = opt.step(residuals, jacobian)
        if RANK == 0 and it % 6 == 5:
            print(f"iteration {it + 1:2d}  mse {sse / len(x):.6e}  damping {opt.param_groups[0]['damping']:.3e}", flush=True)
    worst = residuals(nn.utils.parameters_to_vector(net.parameters())).abs().max().detach()
    if WORLD > 1:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    if RANK == 0:
        print(f"largest residual {worst:.5f}")
    if WORLD > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
