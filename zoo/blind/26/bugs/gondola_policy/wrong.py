"""REINFORCE with a value baseline for a gondola that must stop at drifting landing stages.

The canal has a position and a speed; actions push left, coast, or push right.
Episodes are numbered, each with its own random stream, and dealt over the processes.
"""
import argparse
import math
import os
import random
import time

import torch
import torch.distributed as dist
from torch import nn

HORIZON = 16


class Gondola:
    def __init__(self, episode):
        self.rng = random.Random(7000 + episode)
        self.pos, self.speed = self.rng.uniform(-1, 1), 0.0
        self.stage = self.rng.uniform(-1, 1)
        self.current = self.rng.gauss(0, 0.05)
        self.far = 6.0 if self.rng.random() < 0.2 else 1.0

    def observe(self):
        return [self.pos, self.speed, self.stage - self.pos, self.far / 6]

    def act(self, action):
        self.speed = 0.85 * self.speed + 0.12 * (action - 1) + self.current
        self.pos += self.speed
        self.stage += self.rng.gauss(0, 0.02)
        return -self.far * abs(self.stage - self.pos) - 0.02 * abs(action - 1)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.policy = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))
        self.value = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))


def rollout(agent, episodes):
    boats = [Gondola(e) for e in episodes]
    obs, acts, rewards = [], [], []
    for _ in range(HORIZON):
        o = torch.tensor([b.observe() for b in boats])
        with torch.no_grad():
            cdf = agent.policy(o).softmax(-1).cumsum(-1)
        u = torch.tensor([[b.rng.random()] for b in boats])
        a = (u > cdf).sum(-1).clamp_max(2)
        obs.append(o)
        acts.append(a)
        rewards.append(torch.tensor([b.act(k) for b, k in zip(boats, a.tolist())]))
    ret, run = [], torch.zeros(len(boats))
    for r in reversed(rewards):
        run = r + 0.9 * run
        ret.append(run)
    return torch.cat(obs), torch.cat(acts), torch.cat(ret[::-1]), torch.stack(rewards).sum(0)


def moments(t):
    """Mean and standard deviation over the values of all processes."""
    s = torch.tensor([t.sum(), t.pow(2).sum(), float(t.numel())], dtype=torch.float64)
    dist.all_reduce(s)
    mean = (s[0] / s[2]).item()
    return mean, math.sqrt(max((s[1] / s[2]).item() - mean ** 2, 0.0))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--updates", type=int, default=25)
    ap.add_argument("--episodes", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.1)
    args = ap.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(29)
    agent = Agent()
    opt = torch.optim.SGD(agent.parameters(), lr=args.lr, momentum=0.8)

    for update in range(args.updates):
        ids = range(update * args.episodes, (update + 1) * args.episodes)
        obs, acts, ret, score = rollout(agent, ids[rank::world])
        value = agent.value(obs).squeeze(-1)
        adv = (ret - value).detach()
        adv = (adv - adv.mean()) / (adv.std(unbiased=False) + 1e-6)
        logp = agent.policy(obs).log_softmax(-1)
        chosen = logp.gather(1, acts[:, None]).squeeze(1)
        entropy = -(logp.exp() * logp).sum(-1).mean()
        loss = -(chosen * adv).mean() + 0.02 * (value - ret).pow(2).mean() - 0.01 * entropy
        opt.zero_grad()
        loss.backward()
        for p in agent.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
        opt.step()
        mean, spread = moments(score)
        if rank == 0 and update % 5 == 4:
            print(f"update {update + 1}: score {mean:.5f} +- {spread:.5f}")

    ids = range(100000, 100064)
    mean, _ = moments(rollout(agent, ids[rank::world])[3])
    if rank == 0:
        print(f"evaluation score {mean:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
