"""Clipped policy gradient on a small arena of contexts, with sharded Adam."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as DDP

ROLLOUT = 64
ITERATIONS = 12
INNER = 3
CLIP = 0.2


class Arena:
    """Contexts on a line; each of four moves pays by where one stands."""

    def __init__(self, seed):
        g = torch.Generator().manual_seed(seed)
        self.payoff = torch.randn(5, 4, generator=g)
        self.draws = torch.Generator().manual_seed(seed + 1)

    def contexts(self, n):
        return torch.rand(n, 5, generator=self.draws)

    def luck(self, n):
        return torch.rand(n, generator=self.draws)

    def reward(self, contexts, moves):
        return (contexts @ self.payoff).gather(1, moves[:, None]).squeeze(1) * (1 + contexts[:, 0])


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 32), nn.Tanh())
        self.policy = nn.Linear(32, 4)
        self.value = nn.Linear(32, 1)

    def forward(self, contexts):
        h = self.body(contexts)
        return self.policy(h).log_softmax(-1), self.value(h).squeeze(-1)


def over_ranks(t):
    t = t.clone()
    dist.all_reduce(t)
    return t / dist.get_world_size()


def whiten(advantage):
    mean = over_ranks(advantage.mean())
    std = over_ranks((advantage - mean).square().mean()).sqrt()
    return (advantage - mean) / (std + 1e-8)


def pick(log_probabilities, luck):
    edges = log_probabilities.exp().cumsum(-1)
    return (luck[:, None] > edges).sum(-1).clamp(max=3)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(8)
    arena = Arena(31)
    agent = DDP(Agent())
    optimizer = ZeroRedundancyOptimizer(agent.parameters(), torch.optim.Adam, lr=0.01)
    part = slice(rank * ROLLOUT // world, (rank + 1) * ROLLOUT // world)

    for iteration in range(ITERATIONS):
        contexts = arena.contexts(ROLLOUT)[part]
        luck = arena.luck(ROLLOUT)[part]
        with torch.no_grad():
            log_probabilities, value = agent.module(contexts)
            moves = pick(log_probabilities, luck)
            old = log_probabilities.gather(1, moves[:, None]).squeeze(1)
            reward = arena.reward(contexts, moves)
            advantage = whiten(reward - value)
        for _ in range(INNER):
            log_probabilities, value = agent(contexts)
            new = log_probabilities.gather(1, moves[:, None]).squeeze(1)
            ratio = (new - old).exp()
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage).mean()
            entropy = -(log_probabilities.exp() * log_probabilities).sum(-1).mean()
            loss = -gain + 0.5 * (value - reward).square().mean() - 0.01 * entropy
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if iteration % 3 == 2:
            paid = over_ranks(reward.mean())
            if rank == 0:
                print(f"iteration {iteration + 1}: mean reward {paid:.8f}")
    if rank == 0:
        total = sum(p.detach().square().sum() for p in agent.parameters()).sqrt()
        print(f"agent norm {total:.10f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
