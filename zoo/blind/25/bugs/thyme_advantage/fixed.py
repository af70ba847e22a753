"""Actor-critic for greenhouse heating: 16 houses in different climates, three heating levels, DDP over houses."""
import os
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


@dataclass
class Settings:
    houses: int = 16
    horizon: int = 14
    iterations: int = 40
    gamma: float = 0.9
    lr: float = 4e-3
    entropy: float = 0.01
    seed: int = 23


class Greenhouses:
    """A batch of houses; the temperature decays to the outside one and the heater adds to it."""

    def __init__(self, outside):
        self.outside = outside
        self.temp = None

    def reset(self, start):
        self.temp = start.clone()
        return self.observe()

    def observe(self):
        return torch.stack([self.temp / 20, self.outside / 20, (self.temp - 20) / 5], dim=1)

    def step(self, action, noise):
        heat = torch.tensor([0.0, 2.0, 5.0])[action]
        self.temp = self.temp + 0.25 * (self.outside - self.temp) + heat + 0.3 * noise
        reward = -((self.temp - 20) / 5).pow(2).clamp(max=9.0) - 0.1 * action.float()
        return self.observe(), reward


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.policy = nn.Linear(32, 3)
        self.value = nn.Linear(32, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.policy(h), self.value(h).squeeze(-1)


def standardise(adv):
    stats = torch.stack([adv.sum(), adv.pow(2).sum(), torch.tensor(float(adv.numel()))])
    dist.all_reduce(stats)
    mean = stats[0] / stats[2]
    std = (stats[1] / stats[2] - mean.pow(2)).clamp(min=1e-8).sqrt()
    return (adv - mean) / (std + 1e-6)


def rollout(net, env, start, uniforms, noise):
    obs = env.reset(start)
    seen, acts, rewards = [], [], []
    with torch.no_grad():
        for t in range(len(uniforms)):
            cdf = F.softmax(net(obs)[0], dim=1).cumsum(1)
            action = (uniforms[t][:, None] > cdf[:, :2]).sum(1)
            seen.append(obs)
            obs, reward = env.step(action, noise[t])
            acts.append(action)
            rewards.append(reward)
    return torch.stack(seen), torch.stack(acts), torch.stack(rewards)


def main(cfg=Settings()):
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    per = cfg.houses // world
    own = slice(rank * per, (rank + 1) * per)
    env = Greenhouses(torch.linspace(-5, 18, cfg.houses)[own])
    torch.manual_seed(cfg.seed)
    agent = DDP(ActorCritic())
    opt = torch.optim.Adam(agent.parameters(), lr=cfg.lr)
    rng = torch.Generator().manual_seed(cfg.seed + 1)

    for it in range(1, cfg.iterations + 1):
        start = 10 + 10 * torch.rand(cfg.houses, generator=rng)
        uniforms = torch.rand(cfg.horizon, cfg.houses, generator=rng)
        noise = torch.randn(cfg.horizon, cfg.houses, generator=rng)
        obs, acts, rewards = rollout(agent.module, env, start[own], uniforms[:, own], noise[:, own])
        returns, running = torch.zeros_like(rewards), torch.zeros(per)
        for t in reversed(range(cfg.horizon)):
            running = rewards[t] + cfg.gamma * running
            returns[t] = running
        logits, value = agent(obs)
        logp = F.log_softmax(logits, dim=-1)
        advantage = standardise(returns - value.detach())
        chosen = logp.gather(-1, acts.unsqueeze(-1)).squeeze(-1)
        entropy = -(logp.exp() * logp).sum(-1).mean()
        loss = -(advantage * chosen).mean() + 0.05 * F.mse_loss(value, returns) - cfg.entropy * entropy
        opt.zero_grad()
        loss.backward()
        opt.step()
        mean_reward = rewards.mean()
        dist.all_reduce(mean_reward)
        if rank == 0 and it % 8 == 0:
            print(f"iteration {it} mean reward {mean_reward.item() / world:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
