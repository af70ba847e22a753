"""Advantage actor-critic on a batch of small grid worlds, environments spread over the ranks."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
ENVS = 16
SIZE = 6
HORIZON = 12
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])


class Grids:
    """Environment i has its own goal, its own start and its own stream of random numbers."""

    def __init__(self, ids):
        self.ids = ids
        self.gens = [torch.Generator().manual_seed(500 + i) for i in ids]
        self.goal = torch.tensor([[i % SIZE, (3 * i + 1) % SIZE] for i in ids])
        self.slip = torch.tensor([0.02 * i for i in ids])
        self.reset()

    def reset(self):
        self.pos = torch.stack([torch.randint(SIZE, (2,), generator=g) for g in self.gens])

    def observe(self):
        return torch.cat([self.pos, self.goal], 1).float() / SIZE - 0.5

    def uniforms(self):
        return torch.stack([torch.rand(2, generator=g) for g in self.gens])

    def step(self, action, u):
        action = torch.where(u < self.slip, (action + 1) % 4, action)
        before = (self.pos - self.goal).abs().sum(1)
        self.pos = (self.pos + MOVES[action]).clamp(0, SIZE - 1)
        after = (self.pos - self.goal).abs().sum(1)
        return (before - after).float() + (after == 0).float() * 2


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.pi = nn.Linear(48, 4)
        self.v = nn.Linear(48, 1)

    def forward(self, o):
        h = self.body(o)
        return self.pi(h), self.v(h).squeeze(-1)


def mean(t):
    t = t.detach().clone()
    if WORLD > 1:
        dist.all_reduce(t)
    return t / WORLD


def rollout(net, env):
    obs, acts, rews = [], [], []
    env.reset()
    with torch.no_grad():
        for _ in range(HORIZON):
            o = env.observe()
            u = env.uniforms()
            cdf = net(o)[0].softmax(1).cumsum(1)
            a = (u[:, :1] > cdf).sum(1).clamp(max=3)
            obs.append(o)
            acts.append(a)
            rews.append(env.step(a, u[:, 1]))
    ret, out = torch.zeros(len(env.ids)), []
    for r in reversed(rews):
        ret = r + 0.95 * ret
        out.append(ret)
    return torch.stack(obs), torch.stack(acts), torch.stack(out[::-1]), torch.stack(rews).sum(0)


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = ActorCritic()
    opt = torch.optim.Adam(net.parameters(), lr=5e-3)
    env = Grids(list(range(ENVS))[RANK * ENVS // WORLD:(RANK + 1) * ENVS // WORLD])
    for it in range(25):
        obs, acts, ret, score = rollout(net, env)
        logits, value = net(obs)
        adv = (ret - value).detach()
        adv = (adv - adv.mean()) / (adv.std(unbiased=False) + 1e-6)
        logp = logits.log_softmax(-1)
        chosen = logp.gather(-1, acts.unsqueeze(-1)).squeeze(-1)
        entropy = -(logp.exp() * logp).sum(-1).mean()
        loss = -(adv * chosen).mean() + 0.5 * (ret - value).square().mean() - 0.01 * entropy
        opt.zero_grad()
        loss.backward()
        for p in net.parameters():
            p.grad = mean(p.grad)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        score = mean(score.mean())
        if RANK == 0 and it % 5 == 4:
            print(f"iteration {it + 1} reward {score.item():.4f}")
    if WORLD > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
