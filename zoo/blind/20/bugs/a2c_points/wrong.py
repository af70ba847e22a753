"""Actor-critic on point-mass environments with normalised observations, environments split over the ranks."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ENVS, HORIZON, UPDATES = 32, 12, 30
GAMMA, LAMBDA, ENTROPY = 0.97, 0.9, 0.003


class PointMass:
    """Reach the origin from a random place; observations have very different scales."""

    def __init__(self, start):
        self.pos, self.vel = start[:, :2].clone(), start[:, 2:].clone()

    def observe(self):
        return torch.cat([20 * self.pos + 5, 0.3 * self.vel], dim=1)

    def step(self, action):
        push = action.clamp(-1, 1)
        self.vel = 0.9 * self.vel + 0.2 * push
        self.pos = self.pos + 0.2 * self.vel
        return -self.pos.pow(2).sum(1).sqrt() - 0.05 * push.pow(2).sum(1)


class RunningNorm(nn.Module):
    def __init__(self, size):
        super().__init__()
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("total", torch.zeros(size))
        self.register_buffer("square", torch.zeros(size))

    def update(self, x):
        stats = torch.cat([x.sum(0), x.pow(2).sum(0), torch.tensor([float(len(x))])])
        size = len(self.total)
        self.total += stats[:size]
        self.square += stats[size:2 * size]
        self.count += stats[-1]

    def forward(self, x):
        mean = self.total / self.count
        var = self.square / self.count - mean.pow(2)
        return ((x - mean) / (var + 1e-6).sqrt()).clamp(-5, 5)


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = RunningNorm(4)
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.actor = nn.Linear(32, 2)
        self.critic = nn.Linear(32, 1)
        self.log_std = nn.Parameter(torch.full((2,), -0.5))

    def forward(self, obs):
        h = self.body(self.norm(obs))
        return torch.distributions.Normal(self.actor(h), self.log_std.exp()), self.critic(h).squeeze(-1)


@torch.no_grad()
def collect(policy, update, rank, world):
    gen = torch.Generator().manual_seed(7000 + update)
    start = 2 * torch.rand(ENVS, 4, generator=gen) - 1
    noise = torch.randn(HORIZON, ENVS, 2, generator=gen)
    env, noise = PointMass(start[rank::world]), noise[:, rank::world]
    obs, actions, rewards, values = [], [], [], []
    for t in range(HORIZON):
        seen = env.observe()
        policy.norm.update(seen)
        action_dist, value = policy(seen)
        action = action_dist.mean + action_dist.stddev * noise[t]
        rewards.append(env.step(action))
        obs.append(seen)
        actions.append(action)
        values.append(value)
    values.append(policy(env.observe())[1])

    advantage, advantages = torch.zeros_like(values[0]), []
    for t in reversed(range(HORIZON)):
        delta = rewards[t] + GAMMA * values[t + 1] - values[t]
        advantage = delta + GAMMA * LAMBDA * advantage
        advantages.insert(0, advantage)
    advantages = torch.stack(advantages)
    returns = advantages + torch.stack(values[:-1])
    return torch.stack(obs), torch.stack(actions), advantages, returns, torch.stack(rewards).mean()


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(33)
    policy = ActorCritic()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    for update in range(UPDATES):
        obs, actions, advantages, returns, reward = collect(policy, update, rank, world)
        action_dist, value = policy(obs)
        log_prob = action_dist.log_prob(actions).sum(-1)
        loss = -(log_prob * advantages).mean() + 0.5 * F.mse_loss(value, returns)
        loss = loss - ENTROPY * action_dist.entropy().sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        if world > 1:
            for p in policy.parameters():
                dist.all_reduce(p.grad)
                p.grad /= world
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if world > 1:
            dist.all_reduce(reward)
        if rank == 0 and update % 10 == 9:
            print(f"update {update + 1} reward {reward.item() / world:.8f}")

    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
