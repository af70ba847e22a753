"""PPO in a small windy grid: the environments are shared out over the processes, each with its own random stream."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

SIZE, ENVS, HORIZON, ITERATIONS = 6, 32, 24, 10
GAMMA, LAMBDA, CLIP, EPOCHS, MINIBATCHES, KL_LIMIT = 0.97, 0.9, 0.2, 4, 3, 0.02
MOVES = torch.tensor([[1, 0], [-1, 0], [0, 1], [0, -1]])


class Comm:
    def __init__(self):
        self.rank = int(os.environ.get("RANK", 0))
        self.world = int(os.environ.get("WORLD_SIZE", 1))
        if self.world > 1:
            dist.init_process_group("gloo")

    def mean(self, t):
        """Mean over the ranks, all of which hold equally many samples."""
        if self.world > 1:
            dist.all_reduce(t)
            t /= self.world
        return t

    def average_gradients(self, params):
        flat = self.mean(torch.cat([p.grad.flatten() for p in params]))
        for p, g in zip(params, flat.split([p.numel() for p in params])):
            p.grad.copy_(g.view_as(p))


class Grid:
    """A goal in the far corner, a wind that sometimes pushes down; ids name the environments."""

    def __init__(self, ids):
        self.streams = [torch.Generator().manual_seed(7000 + i) for i in ids]
        self.pos = torch.stack([self.start(g) for g in self.streams])

    @staticmethod
    def start(g):
        return torch.randint(SIZE - 2, (2,), generator=g)

    def uniform(self):
        return torch.stack([torch.rand(2, generator=g) for g in self.streams])

    def observe(self):
        p = self.pos / (SIZE - 1)
        return torch.cat([p, p.square(), p.prod(1, keepdim=True)], 1).to(torch.get_default_dtype())

    def step(self, action, wind):
        move = MOVES[action] + torch.tensor([1, 0]) * (wind < 0.1).long()[:, None]
        self.pos = (self.pos + move).clamp(0, SIZE - 1)
        done = (self.pos == SIZE - 1).all(1)
        reward = done.to(torch.get_default_dtype()) - 0.02
        for e in done.nonzero().flatten().tolist():
            self.pos[e] = self.start(self.streams[e])
        return reward, done


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, 4), nn.Linear(32, 1)

    def forward(self, obs):
        h = self.body(obs)
        return self.policy(h).log_softmax(-1), self.value(h).squeeze(-1)


@torch.no_grad()
def rollout(agent, grid):
    obs, act, logp, val, rew, done = [], [], [], [], [], []
    for _ in range(HORIZON):
        o = grid.observe()
        lp, v = agent(o)
        u = grid.uniform()
        a = (lp.exp().cumsum(1) < u[:, :1]).sum(1).clamp(max=3)
        r, d = grid.step(a, u[:, 1])
        for store, item in zip((obs, act, logp, val, rew, done), (o, a, lp.gather(1, a[:, None])[:, 0], v, r, d)):
            store.append(item)
    obs, act, logp, val, rew, done = map(torch.stack, (obs, act, logp, val, rew, done))
    nxt, run, adv = agent(grid.observe())[1], 0.0, torch.zeros_like(val)
    for t in reversed(range(HORIZON)):
        alive = 1 - done[t].to(val.dtype)
        run = rew[t] + GAMMA * nxt * alive - val[t] + GAMMA * LAMBDA * alive * run
        adv[t], nxt = run, val[t]
    return obs, act, logp, adv, adv + val, rew


def main():
    comm = Comm()
    torch.manual_seed(12)
    agent = Agent()
    params = list(agent.parameters())
    opt = torch.optim.Adam(params, lr=5e-3, eps=1e-5)
    per = ENVS // comm.world
    grid = Grid(range(comm.rank * per, (comm.rank + 1) * per))
    shuffle = torch.Generator().manual_seed(64)
    for iteration in range(ITERATIONS):
        obs, act, logp, adv, ret, rew = rollout(agent, grid)
        moments = comm.mean(torch.stack([adv.mean(), adv.square().mean()]))
        adv = (adv - moments[0]) / ((moments[1] - moments[0].square()).sqrt() + 1e-8)
        used = 0
        for _ in range(EPOCHS):
            kl = torch.zeros(())
            for rows in torch.randperm(HORIZON, generator=shuffle).chunk(MINIBATCHES):
                lp, v = agent(obs[rows])
                new = lp.gather(2, act[rows][..., None])[..., 0]
                ratio = (new - logp[rows]).exp()
                gain = torch.minimum(ratio * adv[rows], ratio.clamp(1 - CLIP, 1 + CLIP) * adv[rows]).mean()
                entropy = -(lp.exp() * lp).sum(-1).mean()
                loss = -gain + 0.5 * (v - ret[rows]).square().mean() - 0.01 * entropy
                opt.zero_grad()
                loss.backward()
                comm.average_gradients(params)
                nn.utils.clip_grad_norm_(params, 0.5)
                opt.step()
                kl += ((ratio - 1) - ratio.log()).mean().detach() / MINIBATCHES
            used += 1
            if comm.mean(kl).item() > KL_LIMIT:
                break
        reward = comm.mean(rew.sum(0).mean()).item()
        if comm.rank == 0:
            print(f"iteration {iteration}: reward {reward:.5f} in {HORIZON} moves, {used} epochs")
    if comm.world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
