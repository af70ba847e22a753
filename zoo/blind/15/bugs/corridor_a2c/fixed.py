"""Advantage actor-critic on a windy corridor, with 16 environments stepped side by side.

The agent has to reach the far end of a corridor against gusts; it sees its place, its speed and
the wind of the moment. Each process steps its part of the environments for a short stretch,
then one update is made from all of them.
"""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ENVS, STRETCH, UPDATES = 16, 12, 40
GAMMA, SEED = 0.95, 1000


class Corridor:
    """Place and speed on a line; three actions (back, wait, on); wind by a random walk."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.place, self.speed, self.time = self.rng.uniform(-1.0, 0.0), 0.0, 0
        self.wind = self.rng.normal() * 0.3
        return self.observe()

    def observe(self):
        return np.array([self.place, self.speed, self.wind, self.time / 30])

    def sample(self, probabilities):
        return int(min((self.rng.random() > np.cumsum(probabilities)).sum(), 2))

    def step(self, action):
        self.wind = 0.9 * self.wind + 0.15 * self.rng.normal()
        self.speed = 0.8 * self.speed + 0.15 * (action - 1) + 0.1 * self.wind
        self.place, self.time = self.place + 0.3 * self.speed, self.time + 1
        arrived, late = self.place > 1.0, self.time >= 30
        reward = 1.0 if arrived else -0.03 - 0.02 * (action != 1)
        done = arrived or late
        return (self.reset() if done else self.observe()), reward, float(done)


class ActorCritic(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.policy, self.value = nn.Linear(width, 3), nn.Linear(width, 1)

    def forward(self, seen):
        h = self.body(seen)
        return torch.log_softmax(self.policy(h), -1), self.value(h).squeeze(-1)


@torch.no_grad()
def collect(model, envs, seen):
    """One stretch of all own environments; returns tensors of shape (time, environment)."""
    rows = []
    for _ in range(STRETCH):
        log_p, _ = model(torch.from_numpy(seen))
        actions = [env.sample(p) for env, p in zip(envs, log_p.exp().numpy())]
        after, rewards, dones = zip(*(env.step(a) for env, a in zip(envs, actions)))
        rows.append((seen, np.array(actions), np.array(rewards), np.array(dones)))
        seen = np.stack(after)
    return [torch.from_numpy(np.stack(column)) for column in zip(*rows)], seen


def returns(rewards, dones, last):
    result = torch.empty_like(rewards)
    for t in reversed(range(STRETCH)):
        last = rewards[t] + GAMMA * (1 - dones[t]) * last
        result[t] = last
    return result


def main():
    for key, value in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29624").items():
        os.environ.setdefault(key, value)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_default_dtype(torch.float64)

    own = ENVS // world
    envs = [Corridor(SEED + rank * own + i) for i in range(own)]
    seen = np.stack([env.observe() for env in envs])
    torch.manual_seed(SEED)
    net = DDP(ActorCritic())
    optimizer = torch.optim.RMSprop(net.parameters(), lr=4e-3, alpha=0.95, eps=1e-4)

    for update in range(UPDATES):
        (observed, actions, rewards, dones), seen = collect(net.module, envs, seen)
        with torch.no_grad():
            target = returns(rewards, dones, net.module(torch.from_numpy(seen))[1])
        log_p, value = net(observed)
        chosen = log_p.gather(-1, actions[..., None]).squeeze(-1)
        entropy = -(log_p.exp() * log_p).sum(-1)
        loss = (-(target - value.detach()) * chosen + 0.5 * (target - value) ** 2 - 0.02 * entropy).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        gained = rewards.mean()
        dist.all_reduce(gained)
        if rank == 0 and update % 8 == 7:
            print(f"update {update + 1} reward a step {gained.item() / world:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
