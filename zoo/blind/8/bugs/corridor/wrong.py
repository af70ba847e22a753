"""REINFORCE in a corridor with a hidden wind."""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

ENVS, HORIZON, UPDATES, SIZE = 16, 14, 80, 9


class Corridor:
    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)
        self.reset()

    def reset(self):
        self.place = int(self.rng.integers(1, SIZE - 1))
        self.goal = int(self.rng.choice([0, SIZE - 1]))
        self.wind = float(self.rng.uniform(0.0, 0.3))
        return self.view()

    def view(self):
        return [self.place / SIZE, self.goal / SIZE, self.wind, 1.0]

    def choose(self, probs):
        return int(self.rng.random() < probs[1])

    def step(self, action):
        move = 1 if action == 1 else -1
        if self.rng.random() < self.wind:
            move = -move
        self.place = min(SIZE - 1, max(0, self.place + move))
        reward = 1.0 if self.place == self.goal else -0.05
        if self.place == self.goal:
            self.place = SIZE // 2
        return self.view(), reward


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))

    def forward(self, views):
        return self.net(views).log_softmax(-1)


@torch.no_grad()
def rollout(envs, policy):
    views, actions, rewards = [], [], []
    now = [env.reset() for env in envs]
    for _ in range(HORIZON):
        probs = policy(torch.tensor(now)).exp().numpy()
        chosen = [env.choose(p) for env, p in zip(envs, probs)]
        views.append(now)
        actions.append(chosen)
        results = [env.step(a) for env, a in zip(envs, chosen)]
        now = [view for view, _ in results]
        rewards.append([r for _, r in results])
    return torch.tensor(views), torch.tensor(actions), torch.tensor(rewards)


def to_go(rewards, gamma=0.95):
    out, acc = torch.zeros_like(rewards), torch.zeros(rewards.shape[1])
    for t in reversed(range(len(rewards))):
        acc = rewards[t] + gamma * acc
        out[t] = acc
    return out


def main():
    for k, v in (("RANK", "0"), ("WORLD_SIZE", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29824")):
        os.environ.setdefault(k, v)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    local = ENVS // world
    envs = [Corridor(seed=500 + i) for i in range(local)]
    torch.manual_seed(2)
    policy = DDP(Policy())
    opt = torch.optim.Adam(policy.parameters(), lr=0.01)
    for update in range(1, UPDATES + 1):
        views, actions, rewards = rollout(envs, policy.module)
        returns = to_go(rewards)
        baseline = returns.mean(1)
        dist.all_reduce(baseline)
        advantage = returns - baseline[:, None] / world
        logp = policy(views.flatten(0, 1)).gather(1, actions.flatten()[:, None]).squeeze(1)
        loss = -(logp * advantage.flatten()).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        score = rewards.sum() / ENVS
        dist.all_reduce(score)
        if rank == 0 and update % 10 == 0:
            print(f"update {update} return {score.item():.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
