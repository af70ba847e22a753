"""REINFORCE with a value baseline on a small corridor; episodes are numbered over all processes."""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30701")

EPISODES, LIMIT, ITERATIONS, GAMMA = 16, 16, 40, 0.97


class Corridor:
    """Walk from a random cell to the right end; wind pushes back at times."""

    def __init__(self, number):
        self.rng = np.random.default_rng(number)
        self.pos = int(self.rng.integers(0, 4))

    def state(self):
        out = torch.zeros(8)
        out[self.pos] = 1
        return out

    def act(self, action):
        self.pos = min(7, max(0, self.pos + (1 if action else -1) - int(self.rng.random() < 0.15)))
        return (1.0 if self.pos == 7 else -0.05), self.pos == 7


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.Tanh())
        self.act, self.value = nn.Linear(16, 2), nn.Linear(16, 1)

    def forward(self, s):
        h = self.body(s)
        return self.act(h).log_softmax(-1), self.value(h).squeeze(-1)


@torch.no_grad()
def episode(policy, number):
    env, states, actions, rewards = Corridor(number), [], [], []
    for _ in range(LIMIT):
        s = env.state()
        a = int(env.rng.random() < policy(s)[0][1].exp().item())
        r, end = env.act(a)
        states.append(s), actions.append(a), rewards.append(r)
        if end:
            break
    returns, g = [], 0.0
    for r in reversed(rewards):
        g = r + GAMMA * g
        returns.append(g)
    return torch.stack(states), torch.tensor(actions), torch.tensor(returns[::-1]), sum(rewards)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    policy = Policy()
    opt = torch.optim.SGD(policy.parameters(), lr=0.1, momentum=0.8)
    for it in range(ITERATIONS):
        mine = [episode(policy, it * EPISODES + k) for k in range(rank, EPISODES, world)]
        s, a, g = (torch.cat([m[i] for m in mine]) for i in range(3))
        logp, value = policy(s)
        loss = -(logp.gather(1, a[:, None]).squeeze(1) * (g - value.detach())).sum() + (g - value).square().sum()
        opt.zero_grad()
        loss.backward()
        stats = torch.tensor([float(len(s)), sum(m[3] for m in mine)])
        dist.all_reduce(stats)
        # episodes differ in length: sums everywhere, one division by all steps
        for p in policy.parameters():
            dist.all_reduce(p.grad)
            p.grad /= stats[0]
        opt.step()
        if rank == 0 and it % 8 == 7:
            print(f"iteration {it + 1} steps {int(stats[0])} mean return {stats[1] / EPISODES:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
