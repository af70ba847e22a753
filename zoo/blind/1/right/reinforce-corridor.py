"""REINFORCE with a value baseline in a small corridor world. Every process plays its own games; games differ in length."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

LENGTH, LIMIT = 9, 25


class Corridor:
    """A batch of walkers; the goal is at one end, wind pushes at random."""

    def __init__(self, n, generator):
        self.n, self.g = n, generator

    def reset(self):
        self.pos = torch.randint(2, LENGTH - 2, (self.n,), generator=self.g)
        self.goal = torch.randint(0, 2, (self.n,), generator=self.g) * (LENGTH - 1)
        self.alive = torch.ones(self.n, dtype=torch.bool)
        return self.observe()

    def observe(self):
        return torch.cat([nn.functional.one_hot(self.pos, LENGTH), (self.goal > 0).long()[:, None]], 1).float()

    def step(self, action):
        wind = (torch.rand(self.n, generator=self.g) < 0.1).long()
        self.pos = (self.pos + 2 * action - 1 - wind).clamp(0, LENGTH - 1)
        won = (self.pos == self.goal) & self.alive
        self.alive = self.alive & ~won
        return self.observe(), won.float() - 0.05


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(LENGTH + 1, 32), nn.Tanh())
        self.pi, self.v = nn.Linear(32, 2), nn.Linear(32, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.pi(h), self.v(h).squeeze(-1)


@torch.no_grad()
def play(net, env, generator, gamma):
    obs, rows = env.reset(), []
    for _ in range(LIMIT):
        alive = env.alive.clone()
        if not alive.any():
            break
        probs = net(obs)[0].softmax(-1)
        act = torch.multinomial(probs, 1, generator=generator).squeeze(1)
        nxt, reward = env.step(act)
        rows.append((obs, act, reward * alive, alive))
        obs = nxt
    ret, returns = torch.zeros(env.n), []
    for *_, reward, alive in reversed(rows):
        ret = reward + gamma * ret
        returns.append(ret)
    o, a, r, m = (torch.stack(c) for c in zip(*rows))
    g = torch.stack(returns[::-1])
    return o[m], a[m], g[m], r.sum(0)


def moments(t):
    s = torch.stack([t.sum(), t.square().sum(), torch.tensor(float(t.numel()))]).double()
    dist.all_reduce(s)
    mean = s[0] / s[2]
    return mean.float(), (s[1] / s[2] - mean ** 2).clamp_min(1e-8).sqrt().float(), s[2].item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--walkers", type=int, default=24)
    ap.add_argument("--updates", type=int, default=30)
    ap.add_argument("--gamma", type=float, default=0.97)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    policy = DDP(ActorCritic())
    opt = torch.optim.Adam(policy.parameters(), lr=0.02)
    g = torch.Generator().manual_seed(500 + rank)
    env = Corridor(args.walkers, g)

    for update in range(1, args.updates + 1):
        obs, act, ret, score = play(policy.module, env, g, args.gamma)
        logits, value = policy(obs)
        adv = ret - value.detach()
        mean, std, count = moments(adv)
        adv = (adv - mean) / std
        dist_pi = torch.distributions.Categorical(logits=logits)
        per_step = -dist_pi.log_prob(act) * adv + 0.5 * (value - ret).square() - 0.01 * dist_pi.entropy()
        loss = per_step.sum() * world / count
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        opt.step()
        if update % 6 == 0:
            avg, _, games = moments(score)
            if rank == 0:
                print(f"update {update:3d} score {avg.item():+.3f} over {games:.0f} games, {count:.0f} moves", flush=True)
    if rank == 0:
        print("done")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
