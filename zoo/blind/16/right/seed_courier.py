"""Evolution strategies for a thruster that must hover: the ranks exchange fitness values only.

Every perturbation of a generation is known by its number, so any process can rebuild it;
what travels is one pair of returns for each perturbation.
"""
import math
import os

import torch
import torch.distributed as dist
from torch import nn

GENERATIONS, PAIRS, SIGMA, LR = 15, 18, 0.08, 0.06
OBS, HIDDEN, STEPS = 3, 12, 24
SHAPES = [(HIDDEN, OBS), (HIDDEN,), (1, HIDDEN), (1,)]


def setup():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def policy(flat, obs):
    parts, at = [], 0
    for shape in SHAPES:
        n = math.prod(shape)
        parts.append(flat[at:at + n].view(shape))
        at += n
    h = torch.tanh(nn.functional.linear(obs, parts[0], parts[1]))
    return nn.functional.linear(h, parts[2], parts[3]).squeeze(-1)


def rollout(flat, height, speed, fuel):
    """Mean return of a batch of start states; the engine is only on or off."""
    total = torch.zeros_like(height)
    for _ in range(STEPS):
        obs = torch.stack([height, speed, fuel], 1)
        on = (policy(flat, obs) > 0).to(height.dtype) * (fuel > 0)
        fuel = fuel - 0.03 * on
        speed = speed + 0.1 * (2.2 * on - 1.0)
        height = height + 0.1 * speed
        total = total - (height - 1.0) ** 2 - 0.05 * speed ** 2 - 0.02 * on
    return total.mean() / STEPS


def starts(generation, count):
    g = torch.Generator().manual_seed(90_000 + generation)
    height = 0.5 + torch.rand(count, generator=g, dtype=torch.float64)
    speed = torch.randn(count, generator=g, dtype=torch.float64) * 0.3
    return height, speed, torch.ones(count, dtype=torch.float64)


def direction(generation, pair, size):
    g = torch.Generator().manual_seed(generation * 10_007 + pair)
    return torch.randn(size, generator=g, dtype=torch.float64)


def centred_ranks(values):
    order = values.argsort(stable=True)
    ranks = torch.empty_like(values)
    ranks[order] = torch.arange(values.numel(), dtype=values.dtype)
    return ranks / (values.numel() - 1) - 0.5


@torch.no_grad()
def main():
    rank, world = setup()
    torch.manual_seed(11)
    size = sum(math.prod(s) for s in SHAPES)
    theta = nn.Parameter(torch.randn(size, dtype=torch.float64) * 0.3)
    opt = torch.optim.Adam([theta], lr=LR, weight_decay=0.002)
    sched = torch.optim.lr_scheduler.StepLR(opt, 8, 0.5)

    for generation in range(GENERATIONS):
        start = starts(generation, 16)
        fitness = torch.zeros(2, PAIRS, dtype=torch.float64)
        for pair in range(rank, PAIRS, world):
            eps = direction(generation, pair, size)
            fitness[0, pair] = rollout(theta + SIGMA * eps, *start)
            fitness[1, pair] = rollout(theta - SIGMA * eps, *start)
        if world > 1:
            dist.all_reduce(fitness)

        shaped = centred_ranks(fitness.flatten()).view(2, PAIRS)
        weight = shaped[0] - shaped[1]
        grad = torch.zeros_like(theta)
        for pair in range(PAIRS):
            grad -= weight[pair] * direction(generation, pair, size)
        theta.grad = grad / (2 * PAIRS * SIGMA)
        opt.step()
        sched.step()
        if rank == 0 and generation % 5 == 4:
            print(f"generation {generation + 1}: mean {fitness.mean():.6f} best {fitness.max():.6f}")

    final = rollout(theta, *starts(-1, 64))
    if rank == 0:
        print(f"held-out return {final:.8f}  |theta| {theta.norm():.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
