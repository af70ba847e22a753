"""REINFORCE on a swarm of carts; observations are whitened by running statistics."""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Normal

N_ENVS, HORIZON, UPDATES, GAMMA = 16, 20, 24, 0.95


class Carts:
    """Point masses on a line with friction; the reward is for staying near the origin."""

    def __init__(self, ids):
        self.rngs = [np.random.default_rng(500 + i) for i in ids]
        self.mass = np.array([1.0 + 0.1 * i for i in ids])

    def reset(self):
        self.s = np.stack([r.normal(size=2) * [2.0, 0.5] for r in self.rngs])
        return self.obs()

    def obs(self):
        return np.concatenate([self.s, self.mass[:, None] * 3], 1)

    def step(self, force):
        self.s[:, 1] += (force - 0.2 * self.s[:, 1]) / self.mass * 0.3
        self.s[:, 0] += self.s[:, 1] * 0.3
        return self.obs(), -np.abs(self.s[:, 0]) - 0.01 * force ** 2

    def noise(self):
        return np.array([r.normal() for r in self.rngs])


class RunningStat:
    def __init__(self, dim):
        self.n, self.total, self.square = 1.0, np.zeros(dim), np.ones(dim)

    def update(self, x):
        new = np.concatenate([x.sum(0), (x ** 2).sum(0), [len(x)]])
        d = x.shape[1]
        self.total += new[:d]
        self.square += new[d:2 * d]
        self.n += new[-1]

    def __call__(self, x):
        mean = self.total / self.n
        std = np.sqrt(np.maximum(self.square / self.n - mean ** 2, 1e-4))
        return torch.tensor((x - mean) / std)


def discounted(rewards):
    out, run = [], np.zeros_like(rewards[0])
    for r in reversed(rewards):
        run = r + GAMMA * run
        out.append(run)
    return torch.tensor(np.stack(out[::-1]))


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world == 1:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29633")
    dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.manual_seed(9)
    policy = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1)).double()
    opt = torch.optim.Adam(policy.parameters(), lr=5e-3)
    envs = Carts(range(rank * N_ENVS // world, (rank + 1) * N_ENVS // world))
    stat = RunningStat(3)

    for update in range(UPDATES):
        obs, logps, rewards = envs.reset(), [], []
        for _ in range(HORIZON):
            stat.update(obs)
            mean = policy(stat(obs)).squeeze(1)
            pi = Normal(mean, 0.5)
            act = mean.detach() + 0.5 * torch.tensor(envs.noise())
            logps.append(pi.log_prob(act))
            obs, rew = envs.step(act.numpy())
            rewards.append(rew)
        returns = discounted(rewards)
        base = returns.sum(1, keepdim=True)
        dist.all_reduce(base)
        loss = -(torch.stack(logps) * (returns - base / N_ENVS)).sum() / (N_ENVS * HORIZON)
        opt.zero_grad()
        loss.backward()
        for p in policy.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        if update % 6 == 5:
            score = torch.tensor(np.sum(rewards))
            dist.all_reduce(score)
            if rank == 0:
                print(f"update {update + 1}: mean return {score.item() / N_ENVS:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
