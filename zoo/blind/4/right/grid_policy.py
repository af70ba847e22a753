"""Policy gradient on a small grid with walls; processes play different episodes."""
import argparse
import time
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

SIDE, LIMIT = 5, 20
WALLS = {(1, 1), (1, 3), (3, 1), (3, 3)}
MOVES = [(-1, 0), (1, 0), (0, -1), (0, 1)]


@dataclass
class Settings:
    episodes: int = 16
    rounds: int = 30
    lr: float = 0.02
    gamma: float = 0.95
    entropy: float = 0.01


def encode(agent, goal):
    v = torch.zeros(2 * SIDE * SIDE, dtype=torch.float64)
    v[agent[0] * SIDE + agent[1]] = 1
    v[SIDE * SIDE + goal[0] * SIDE + goal[1]] = 1
    return v


def play(policy, seed, gamma):
    rng = np.random.default_rng(seed)
    free = [(i, j) for i in range(SIDE) for j in range(SIDE) if (i, j) not in WALLS]
    a, g = rng.choice(len(free), 2, replace=False)
    agent, goal = free[a], free[g]
    states, actions, rewards = [], [], []
    while len(states) < LIMIT and agent != goal:
        s = encode(agent, goal)
        with torch.no_grad():
            p = policy(s).softmax(0).numpy()
        act = min(int(np.searchsorted(p.cumsum(), rng.random())), 3)
        nxt = (agent[0] + MOVES[act][0], agent[1] + MOVES[act][1])
        if nxt in free:
            agent = nxt
        states.append(s)
        actions.append(act)
        rewards.append(1.0 if agent == goal else -0.02)
    returns, r = [], 0.0
    for x in reversed(rewards):
        r = x + gamma * r
        returns.append(r)
    return states, actions, returns[::-1], agent == goal


def main(c):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    policy = nn.Sequential(nn.Linear(2 * SIDE * SIDE, 32), nn.Tanh(), nn.Linear(32, 4)).double()
    opt = torch.optim.RMSprop(policy.parameters(), lr=c.lr)
    for rnd in range(c.rounds):
        states, actions, returns, wins = [], [], [], 0
        for e in range(rank, c.episodes, world):
            s, a, r, won = play(policy, (rnd, e), c.gamma)
            states += s
            actions += a
            returns += r
            wins += won
        ret = torch.tensor(returns, dtype=torch.float64)
        stats = torch.stack([torch.tensor(float(len(ret)), dtype=torch.float64), ret.sum(), ret.square().sum(),
                             torch.tensor(float(wins), dtype=torch.float64)])
        dist.all_reduce(stats)
        n, mean = stats[0], stats[1] / stats[0]
        adv = (ret - mean) / ((stats[2] / n - mean ** 2).clamp(min=0).sqrt() + 1e-6)
        logp = policy(torch.stack(states)).log_softmax(1)
        chosen = logp[torch.arange(len(ret)), torch.tensor(actions)]
        loss = -((chosen * adv).sum() - c.entropy * (logp.exp() * logp).sum()) / n
        opt.zero_grad()
        loss.backward()
        for p in policy.parameters():
            dist.all_reduce(p.grad)
        opt.step()
        if rnd % 6 == 5 and rank == 0:
            print(f"round {rnd + 1}: reached {int(stats[3])}/{c.episodes}, {int(n)} moves, return {mean:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    for k, v in vars(Settings()).items():
        ap.add_argument("--" + k, type=type(v), default=v)
    main(Settings(**vars(ap.parse_args())))
