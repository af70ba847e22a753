"""Policy gradient in many small worlds. A world draws from its own stream, wherever it happens to run."""
import argparse
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn


class Corridor:
    """Reach the lamp, which drifts; three actions."""

    def __init__(self, world_id, episode):
        self.rng = np.random.default_rng((world_id, episode))
        self.pos, self.lamp = self.rng.integers(0, 11, 2).astype(float)

    def observe(self):
        d = self.lamp - self.pos
        return np.array([d / 10, np.sign(d), self.pos / 10, self.lamp / 10, abs(d) / 10, 1.0], dtype=np.float32)

    def act(self, a):
        self.pos = float(np.clip(self.pos + (a - 1), 0, 10))
        if self.rng.random() < 0.3:
            self.lamp = float(np.clip(self.lamp + self.rng.choice([-1, 1]), 0, 10))
        return -abs(self.lamp - self.pos) / 10


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 3))

    def forward(self, obs):
        return self.net(obs).log_softmax(-1)


def rollout(policy, worlds, horizon):
    obs, acts, rewards = [], [], []
    for _ in range(horizon):
        o = torch.from_numpy(np.stack([w.observe() for w in worlds]))
        with torch.no_grad():
            p = policy(o).exp().double().numpy()
        a = [int((w.rng.random() > np.cumsum(q / q.sum())[:-1]).sum()) for w, q in zip(worlds, p)]
        rewards.append([w.act(k) for w, k in zip(worlds, a)])
        obs.append(o)
        acts.append(torch.tensor(a))
    r = torch.tensor(rewards, dtype=torch.float32)
    returns = r.flip(0).cumsum(0).flip(0)
    return torch.stack(obs), torch.stack(acts), returns


def standardise(returns):
    """Over the episodes of all ranks."""
    s = torch.tensor([returns.sum(), (returns ** 2).sum(), returns.numel()], dtype=torch.float64)
    dist.all_reduce(s)
    mean = s[0] / s[2]
    std = (s[1] / s[2] - mean ** 2).sqrt()
    return ((returns - mean) / std).float(), mean.item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--episodes", type=int, default=25)
    ap.add_argument("--worlds", type=int, default=16)
    ap.add_argument("--horizon", type=int, default=15)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy = Policy()
    opt = torch.optim.SGD(policy.parameters(), lr=0.5)
    ids = list(range(args.worlds))[rank::size]
    torch.manual_seed(rank)
    for episode in range(args.episodes):
        obs, acts, returns = rollout(policy, [Corridor(i, episode) for i in ids], args.horizon)
        advantage, mean = standardise(returns)
        chosen = policy(obs).gather(-1, acts.unsqueeze(-1)).squeeze(-1)
        loss = -(chosen * advantage).sum() / (args.worlds * args.horizon)
        opt.zero_grad()
        loss.backward()
        for p in policy.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        if rank == 0 and episode % 5 == 4:
            print(f"episode {episode + 1}: mean return {mean:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
