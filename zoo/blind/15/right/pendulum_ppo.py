"""PPO on eight pendulums, shared out over the processes: clipped surrogate, GAE, running scale of observations,
advantages standardised over the whole roll-out, early end of an update by the KL divergence. float64.
"""
import math
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

PENDULUMS, HORIZON, UPDATES, EPOCHS, PARTS = 8, 32, 6, 3, 4
GAMMA, LAMBDA, CLIP, TARGET_KL = 0.95, 0.9, 0.2, 0.012
torch.set_default_dtype(torch.float64)


class Pendulum:
    """Own start and own noise, by the pendulum's number."""

    def __init__(self, number):
        self.rng = np.random.default_rng([4, number])
        self.angle, self.speed = self.rng.uniform(-math.pi, math.pi), 0.0

    def observe(self):
        return [math.cos(self.angle), math.sin(self.angle), self.speed]

    def noise(self):
        return self.rng.normal()

    def push(self, torque):
        torque = max(-2.0, min(2.0, torque))
        wrapped = (self.angle + math.pi) % (2 * math.pi) - math.pi
        reward = -(wrapped ** 2 + 0.1 * self.speed ** 2 + 0.001 * torque ** 2)
        self.speed = max(-8.0, min(8.0, self.speed + 0.05 * (15 * math.sin(self.angle) + 3 * torque)))
        self.angle += 0.05 * self.speed
        return reward


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1))
        self.critic = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1))
        self.log_std = nn.Parameter(torch.tensor([-0.3]))

    def forward(self, x):
        return torch.distributions.Normal(self.actor(x)[..., 0], self.log_std.exp()), self.critic(x)[..., 0]


class Scale:
    """Running mean and spread of the observations of all processes."""

    def __init__(self):
        self.count, self.sum, self.square = 1e-2, torch.zeros(3), torch.full((3,), 1e-2)

    def update(self, x):
        x = x.reshape(-1, 3)
        news = torch.cat([x.sum(0), x.square().sum(0), torch.tensor([float(len(x))])])
        dist.all_reduce(news)
        self.sum, self.square, self.count = self.sum + news[:3], self.square + news[3:6], self.count + news[6].item()

    def __call__(self, x):
        mean = self.sum / self.count
        return ((x - mean) / (self.square / self.count - mean ** 2).sqrt()).clamp(-5, 5)


def summed(*values):
    t = torch.stack([torch.as_tensor(v, dtype=torch.float64) for v in values])
    dist.all_reduce(t)
    return t.tolist()


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29620").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1000 + rank)
    share = PENDULUMS // world
    envs = [Pendulum(i) for i in range(rank * share, (rank + 1) * share)]
    model, scale = DDP(ActorCritic()), Scale()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-5)
    steps = 0
    for update in range(UPDATES):
        seen, acts, rewards = [], [], []
        with torch.no_grad():
            for _ in range(HORIZON):
                x = torch.tensor([e.observe() for e in envs])
                policy, _ = model.module(scale(x))
                action = policy.mean + policy.stddev * torch.tensor([e.noise() for e in envs])
                seen.append(x), acts.append(action)
                rewards.append(torch.tensor([e.push(a) for e, a in zip(envs, action.tolist())]))
            raw, acts, rewards = torch.stack(seen), torch.stack(acts), torch.stack(rewards) / 10
            x = scale(raw)
            policy, values = model.module(x)
            old = policy.log_prob(acts)
            following = model.module(scale(torch.tensor([e.observe() for e in envs])))[1]
            advantage, carry = torch.zeros_like(rewards), 0.0
            for t in reversed(range(HORIZON)):
                carry = rewards[t] + GAMMA * following - values[t] + GAMMA * LAMBDA * carry
                advantage[t], following = carry, values[t]
            returns = advantage + values
            total, square, reward = summed(advantage.sum(), advantage.square().sum(), rewards.sum())
            mean = total / (HORIZON * PENDULUMS)
            advantage = (advantage - mean) / math.sqrt(square / (HORIZON * PENDULUMS) - mean ** 2)
        draws = torch.Generator().manual_seed(update)               # times of a minibatch, the same for all pendulums
        for epoch in range(EPOCHS):
            divergence = 0.0
            for times in torch.randperm(HORIZON, generator=draws).chunk(PARTS):
                policy, value = model(x[times])
                ratio = (policy.log_prob(acts[times]) - old[times]).exp()
                a = advantage[times]
                loss = (-torch.min(ratio * a, ratio.clamp(1 - CLIP, 1 + CLIP) * a).mean()
                        + 0.5 * (value - returns[times]).square().mean() - 0.002 * policy.entropy().mean())
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                steps += 1
                divergence += (ratio - 1 - ratio.log()).sum().item()
            divergence = summed(divergence)[0] / (HORIZON * PENDULUMS)
            if divergence > TARGET_KL:
                break
        scale.update(raw)
        if rank == 0:
            print(f"update {update} reward {reward / HORIZON / PENDULUMS:.5f} epochs {epoch + 1} kl {divergence:.5f} steps {steps}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
