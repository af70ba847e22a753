"""REINFORCE: sixteen buoys are to be held at the origin against their own currents; observations are standardised
with running statistics. Every buoy has a generator of its own, so episodes do not depend on the process."""
import os
import time

import torch
import torch.distributed as dist
from torch import nn

BUOYS, HORIZON, UPDATES, GAMMA = 16, 20, 15, 0.95


class RunningStats:
    def __init__(self, size):
        self.n = torch.tensor(1e-2)
        self.sum = torch.zeros(size)
        self.square = torch.full((size,), 1e-2)

    def update(self, obs):
        new = torch.cat([torch.tensor([float(len(obs))]), obs.sum(0), (obs ** 2).sum(0)])
        dist.all_reduce(new)
        k = obs.shape[1]
        self.n = self.n + new[0]
        self.sum = self.sum + new[1:1 + k]
        self.square = self.square + new[1 + k:]

    def __call__(self, obs):
        mean = self.sum / self.n
        var = (self.square / self.n - mean ** 2).clamp(min=1e-4)
        return (obs - mean) / var.sqrt()


class Buoy:
    def __init__(self, ident):
        self.g = torch.Generator().manual_seed(1000 + ident)
        self.current = 0.05 * (ident - BUOYS / 2)
        self.scale = 1.0 + ident

    def uniform(self):
        return torch.rand((), generator=self.g)

    def reset(self):
        self.pos, self.vel = 4 * self.uniform() - 2, torch.zeros(())
        return self.look()

    def look(self):
        return torch.stack([self.pos, self.vel, self.scale * (self.pos + 0.1 * self.uniform())])

    def push(self, right):
        self.vel = 0.8 * self.vel + (0.2 if right else -0.2) + 0.1 * self.current
        self.pos = self.pos + self.vel
        return self.look(), -self.pos.abs()


def episode(buoy, policy, stats):
    obs, logs, rewards, raw = buoy.reset(), [], [], []
    for _ in range(HORIZON):
        raw.append(obs)
        p = torch.sigmoid(policy(stats(obs[None]))).squeeze()
        right = bool(buoy.uniform() < p)
        logs.append(torch.log(p if right else 1 - p))
        obs, r = buoy.push(right)
        rewards.append(r)
    returns, acc = [], torch.zeros(())
    for r in reversed(rewards):
        acc = r + GAMMA * acc
        returns.append(acc)
    returns = torch.stack(returns[::-1]) + 10.0
    return -(torch.stack(logs) * returns).mean(), sum(rewards), torch.stack(raw)


def main():
    torch.set_default_dtype(torch.float64)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    policy = nn.Sequential(nn.Linear(3, 12), nn.Tanh(), nn.Linear(12, 1))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.05)
    stats = RunningStats(3)
    mine = [Buoy(i) for i in range(rank, BUOYS, world)]
    for update in range(UPDATES):
        results = [episode(b, policy, stats) for b in mine]
        optimizer.zero_grad()
        (sum(r[0] for r in results) / BUOYS).backward()
        for p in policy.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
        stats.update(torch.cat([r[2] for r in results]))
        reward = sum(r[1] for r in results)
        dist.all_reduce(reward)
        if rank == 0 and update % 5 == 4:
            print(f"update {update + 1}: reward {reward.item() / BUOYS:.6f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
