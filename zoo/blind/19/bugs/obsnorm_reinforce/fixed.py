"""REINFORCE on a fleet of simulated carts, with running observation normalisation."""
import os

import torch
import torch.distributed as dist
from torch import nn

ENVS = 16
HORIZON = 25
ITERATIONS = 12


class Carts:
    """Point masses that must be driven to the origin; every cart has its own mass and track."""

    def __init__(self, ids):
        self.ids = ids
        self.mass = torch.tensor([0.5 + 0.15 * i for i in ids])
        self.start = torch.tensor([-2.0 + 0.3 * i for i in ids])

    def reset(self, iteration):
        self.rng = [torch.Generator().manual_seed(1000 * iteration + i) for i in self.ids]
        self.x = self.start + torch.cat([0.2 * torch.randn(1, generator=g) for g in self.rng])
        self.v = torch.zeros(len(self.ids))
        return self.observe()

    def noise(self):
        return torch.cat([torch.randn(1, generator=g) for g in self.rng])

    def observe(self):
        return torch.stack([self.x, self.v, self.mass], dim=1)

    def step(self, force):
        self.v = 0.95 * self.v + 0.1 * force / self.mass
        self.x = self.x + 0.1 * self.v
        reward = -(self.x.square() + 0.05 * force.square())
        return self.observe(), reward


class RunningNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("var", torch.ones(dim))
        self.register_buffer("count", torch.tensor(1e-4))

    def update(self, x, world):
        stats = torch.stack([x.mean(0), x.square().mean(0)])
        n = x.shape[0] * world
        if world > 1:
            dist.all_reduce(stats)
            stats /= world
        mean, var = stats[0], stats[1] - stats[0].square()
        delta = mean - self.mean
        total = self.count + n
        m2 = self.var * self.count + var * n + delta.square() * self.count * n / total
        self.mean += delta * n / total
        self.var.copy_(m2 / total)
        self.count.copy_(total)

    def forward(self, x):
        return ((x - self.mean) / (self.var + 1e-8).sqrt()).clamp(-5, 5)


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(3)
    per_rank = ENVS // world
    carts = Carts(list(range(rank * per_rank, (rank + 1) * per_rank)))
    norm = RunningNorm(3)
    policy = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(policy.parameters(), lr=0.02)
    sigma = 0.5

    for iteration in range(ITERATIONS):
        obs, seen, actions, rewards = carts.reset(iteration), [], [], []
        for _ in range(HORIZON):
            with torch.no_grad():
                action = policy(norm(obs)).squeeze(1) + sigma * carts.noise()
            seen.append(obs)
            actions.append(action)
            obs, reward = carts.step(action)
            rewards.append(reward)
        seen, actions, rewards = torch.stack(seen), torch.stack(actions), torch.stack(rewards)
        returns = rewards.flip(0).cumsum(0).flip(0) / HORIZON
        baseline = returns.sum(1, keepdim=True)
        if world > 1:
            dist.all_reduce(baseline)
        advantage = returns - baseline / ENVS

        mu = policy(norm(seen)).squeeze(2)
        logp = -(actions - mu).square() / (2 * sigma**2)
        loss = -(logp * advantage).sum() / (ENVS * HORIZON)
        optimizer.zero_grad()
        loss.backward()
        score = rewards.sum() / ENVS
        if world > 1:
            for p in policy.parameters():
                dist.all_reduce(p.grad)
            dist.all_reduce(score)
        optimizer.step()
        norm.update(seen.flatten(0, 1), world)
        if rank == 0 and iteration % 3 == 2:
            print(f"iteration {iteration} return {score.item():.8f}")

    if rank == 0:
        print("obs std", [round(v, 8) for v in norm.var.sqrt().tolist()])
        print(f"policy norm {sum(p.detach().square().sum() for p in policy.parameters()).item():.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
