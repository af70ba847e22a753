"""Levenberg-Marquardt fit of a small network to a pair potential; measurements are spread over processes."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.func import functional_call, jacrev
from torch.nn.utils import parameters_to_vector

SAMPLES = 160
ITERATIONS = 30


def reduce_sum(t):
    if dist.is_initialized():
        dist.all_reduce(t)
    return t


def measurements():
    g = torch.Generator().manual_seed(17)
    r = 0.9 + 1.6 * torch.rand(SAMPLES, 1, generator=g, dtype=torch.float64)
    energy = 4 * (r.pow(-12) - r.pow(-6))
    energy = energy.clamp(max=3) + 0.15 * torch.randn(SAMPLES, 1, generator=g, dtype=torch.float64)
    return r, energy


class Potential(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
        )

    def forward(self, r):
        return self.net(1 / r)


def make_residual(model, r, energy):
    names, shapes = zip(*[(n, p.shape) for n, p in model.named_parameters()])
    sizes = [s.numel() for s in shapes]

    def residual(theta):
        parts = theta.split(sizes)
        weights = {n: v.view(s) for n, v, s in zip(names, parts, shapes)}
        return (functional_call(model, weights, (r,)) - energy).squeeze(1)

    return residual


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    r, energy = measurements()
    torch.manual_seed(2)
    model = Potential().double()
    residual = make_residual(model, r[rank::world], energy[rank::world])
    jacobian = jacrev(residual)
    theta = parameters_to_vector(model.parameters()).detach()
    eye = torch.eye(len(theta), dtype=theta.dtype)
    damping, accepted = 0.1, 0

    for iteration in range(ITERATIONS):
        res, jac = residual(theta), jacobian(theta)
        normal = reduce_sum(jac.T @ jac)
        slope = reduce_sum(jac.T @ res)
        trial = theta - torch.linalg.solve(normal + damping * eye, slope)
        before, after = res.square().sum(), residual(trial).square().sum()
        if after < before:
            theta, damping, accepted = trial, max(damping / 4, 1e-3), accepted + 1
        else:
            damping = damping * 3
        if rank == 0 and iteration % 6 == 5:
            print(f"iteration {iteration + 1} damping {damping:.3e} accepted {accepted}")

    with torch.no_grad():
        total = reduce_sum(residual(theta).square().sum())
    if rank == 0:
        print(f"rms {(total / SAMPLES).sqrt().item():.6f} theta norm {theta.norm().item():.5f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
