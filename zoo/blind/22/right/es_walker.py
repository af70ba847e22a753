"""Evolution strategies for a cart that has to stop at the origin (no backpropagation).

Members of the population are evaluated by different processes; the noise of a member follows from
(generation, pair), so only the returns have to be exchanged.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.func import functional_call
from torch.nn.utils import parameters_to_vector, vector_to_parameters

PAIRS, SIGMA, GENERATIONS, HORIZON = 16, 0.1, 12, 24


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1), nn.Tanh())

    def forward(self, obs):
        return self.net(obs).squeeze(-1)


def unflatten(policy, vector):
    out, at = {}, 0
    for name, p in policy.named_parameters():
        out[name] = vector[at : at + p.numel()].view_as(p)
        at += p.numel()
    return out


def episode_return(policy, weights, start):
    position, speed = start[:, 0].clone(), start[:, 1].clone()
    score = torch.zeros(len(start))
    for _ in range(HORIZON):
        obs = torch.stack([position, speed, position.sign()], -1)
        force = functional_call(policy, weights, (obs,))
        speed = 0.95 * speed + 0.2 * force
        position = position + 0.2 * speed
        score -= position.square() + 0.1 * speed.square() + 0.01 * force.square()
    return score.mean() / HORIZON


def noise(generation, pair, size):
    g = torch.Generator().manual_seed(100_003 * generation + pair)
    return torch.randn(size, generator=g)


def centred_ranks(values):
    ranks = torch.empty(len(values))
    ranks[values.argsort()] = torch.arange(len(values), dtype=torch.get_default_dtype())
    return ranks / (len(values) - 1) - 0.5


def share(values):
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


@torch.no_grad()
def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")

    torch.manual_seed(1)
    policy = Policy()
    opt = torch.optim.Adam(policy.parameters(), lr=0.05)
    starts = torch.Generator().manual_seed(2)
    exam = torch.randn(64, 2, generator=torch.Generator().manual_seed(3))

    for generation in range(GENERATIONS):
        start = torch.randn(16, 2, generator=starts)
        centre = parameters_to_vector(policy.parameters())
        returns = torch.zeros(2 * PAIRS)
        for pair in range(rank, PAIRS, world):
            eps = noise(generation, pair, len(centre))
            for k, sign in enumerate((1.0, -1.0)):
                weights = unflatten(policy, centre + sign * SIGMA * eps)
                returns[2 * pair + k] = episode_return(policy, weights, start)
        share(returns)

        utility = centred_ranks(returns)
        slope = torch.zeros_like(centre)
        for pair in range(PAIRS):
            slope += (utility[2 * pair] - utility[2 * pair + 1]) * noise(generation, pair, len(centre))
        slope /= 2 * PAIRS * SIGMA
        for name, g in unflatten(policy, -slope).items():
            policy.get_parameter(name).grad = g.clone()
        opt.step()
        if rank == 0 and generation % 4 == 3:
            print(f"generation {generation + 1} mean return {returns.mean():.6f}")

    if rank == 0:
        final = episode_return(policy, dict(policy.named_parameters()), exam)
        print(f"exam return {final:.6f}")
    # the elite is the best member of a last, narrower search around the centre
    centre = parameters_to_vector(policy.parameters())
    scores = torch.zeros(8)
    for member in range(rank, 8, world):
        candidate = centre + 0.02 * noise(GENERATIONS, member, len(centre))
        scores[member] = episode_return(policy, unflatten(policy, candidate), exam)
    best = int(share(scores).argmax())
    vector_to_parameters(centre + 0.02 * noise(GENERATIONS, best, len(centre)), policy.parameters())
    if rank == 0:
        print(f"elite {best} return {scores[best]:.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
