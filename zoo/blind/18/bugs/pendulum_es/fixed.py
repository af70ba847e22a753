"""Swing-up of a pendulum with an evolution strategy: mirrored perturbations, rank-shaped returns, no autograd."""
import os

import torch
import torch.distributed as dist

PAIRS, SIGMA, GENERATIONS, HORIZON = 16, 0.1, 24, 60
SHAPES = [(3, 10), (10,), (10, 1), (1,)]
SIZE = sum(torch.Size(s).numel() for s in SHAPES)


def unpack(flat):
    """flat (members, SIZE) -> list of (members, *shape)"""
    out, at = [], 0
    for shape in SHAPES:
        n = torch.Size(shape).numel()
        out.append(flat[:, at:at + n].reshape(-1, *shape))
        at += n
    return out


def returns(flat, starts):
    """Mean return of every member over all start angles."""
    w1, b1, w2, b2 = unpack(flat)
    members, count = len(flat), len(starts)
    angle = starts.expand(members, count).clone()
    speed = torch.zeros(members, count)
    total = torch.zeros(members, count)
    for _ in range(HORIZON):
        obs = torch.stack([angle.cos(), angle.sin(), speed / 4], -1)
        hidden = torch.tanh(torch.einsum("mco,moh->mch", obs, w1) + b1[:, None])
        force = 2 * torch.tanh(torch.einsum("mch,mho->mco", hidden, w2) + b2[:, None])[..., 0]
        speed = (speed + 0.05 * (7.5 * angle.sin() + 3 * force)).clamp(-8, 8)
        angle = angle + 0.05 * speed
        total -= (1 - angle.cos()) + 0.01 * speed.pow(2) + 0.001 * force.pow(2)
    return total.mean(1) / HORIZON


def noise(generation, number):
    gen = torch.Generator().manual_seed(10_000 * generation + number)
    return torch.randn(SIZE, generator=gen)


def shaped(values):
    """Returns replaced by their places, between -0.5 and 0.5."""
    place = torch.empty(len(values))
    place[values.argsort(stable=True)] = torch.arange(len(values), dtype=place.dtype)
    return place / (len(values) - 1) - 0.5


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(1)
    policy = torch.nn.Parameter(torch.randn(SIZE) * 0.3)
    opt = torch.optim.Adam([policy], lr=0.05)
    exam = torch.linspace(0.5, 5.8, 9)
    per = PAIRS // world
    first = rank * per
    for generation in range(GENERATIONS):
        starts = 6.28 * torch.rand(4, generator=torch.Generator().manual_seed(generation))
        eps = torch.stack([noise(generation, first + i) for i in range(per)])
        plus = returns(policy.detach() + SIGMA * eps, starts)
        minus = returns(policy.detach() - SIGMA * eps, starts)
        mine = torch.stack([plus, minus], 1)
        if world > 1:
            parts = [torch.empty_like(mine) for _ in range(world)]
            dist.all_gather(parts, mine)
            everything = torch.cat(parts)
        else:
            everything = mine
        weight = shaped(everything.flatten()).view(-1, 2)[first:first + per]
        direction = ((weight[:, 0] - weight[:, 1])[:, None] * eps).sum(0)
        if world > 1:
            dist.all_reduce(direction)
        policy.grad = -direction / (2 * PAIRS * SIGMA)
        opt.step()
        if generation % 6 == 5:
            value = returns(policy.detach()[None], exam).item()
            if rank == 0:
                print(f"generation {generation + 1}: exam {value:.8f} population {everything.mean().item():.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
