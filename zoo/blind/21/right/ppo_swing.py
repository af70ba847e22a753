"""PPO on a small swing task; the environments are divided over the ranks."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn

ENVS, HORIZON, ITERS, EPOCHS, CHUNKS = 16, 32, 4, 4, 4
GAMMA, LAM, CLIP, TARGET_KL = 0.97, 0.9, 0.2, 0.012


class Swing:
    """Every environment has a number and a random stream of its own."""

    def __init__(self, numbers):
        self.gens = [torch.Generator().manual_seed(500 + n) for n in numbers]
        self.state = torch.stack([self.fresh(g) for g in self.gens])
        self.age = torch.zeros(len(numbers), dtype=torch.long)

    def fresh(self, g):
        return torch.rand(2, generator=g) * 2 - 1

    def uniform(self):
        return torch.stack([torch.rand((), generator=g) for g in self.gens])

    def obs(self):
        a, v = self.state.unbind(1)
        return torch.stack([a.sin(), a.cos(), v], 1)

    def step(self, action):
        a, v = self.state.unbind(1)
        force = (action - 1).to(a.dtype) * 2.0
        v = 0.98 * v + 0.1 * (force + 1.5 * a.sin())
        a = a + 0.1 * v
        self.state = torch.stack([a, v], 1)
        self.age += 1
        done = (a.abs() > 2.5) | (self.age >= 40)
        reward = a.cos() - 0.02 * force.square()
        for k in done.nonzero().flatten().tolist():
            self.state[k] = self.fresh(self.gens[k])
            self.age[k] = 0
        return reward, done


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.pi, self.v = nn.Linear(32, 3), nn.Linear(32, 1)

    def forward(self, o):
        h = self.body(o)
        return self.pi(h).log_softmax(-1), self.v(h).squeeze(-1)


def total(t, world):
    if world > 1:
        dist.all_reduce(t)
    return t


def mean_gradient(net, world):
    grads = [p.grad for p in net.parameters()]
    flat = total(torch.cat([g.flatten() for g in grads]), world) / world
    for g, part in zip(grads, flat.split([g.numel() for g in grads])):
        g.copy_(part.view_as(g))


@torch.no_grad()
def rollout(net, env):
    O, A, P, R, D, V = [], [], [], [], [], []
    for _ in range(HORIZON):
        o = env.obs()
        logp, v = net(o)
        a = (env.uniform()[:, None] > logp.exp().cumsum(1)[:, :2]).sum(1)
        r, d = env.step(a)
        for box, item in zip((O, A, P, R, D, V), (o, a, logp.gather(1, a[:, None])[:, 0], r, d, v)):
            box.append(item)
    nxt = net(env.obs())[1]
    O, A, P, R, D, V = map(torch.stack, (O, A, P, R, D, V))
    adv, run = torch.zeros_like(R), torch.zeros_like(nxt)
    for t in reversed(range(HORIZON)):
        keep = (~D[t]).to(R.dtype)
        run = R[t] + GAMMA * nxt * keep - V[t] + GAMMA * LAM * keep * run
        adv[t], nxt = run, V[t]
    return O, A, P, R, adv, adv + V


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    env = Swing(range(rank * ENVS // world, (rank + 1) * ENVS // world))
    torch.manual_seed(2)
    net = ActorCritic()
    opt = torch.optim.Adam(net.parameters(), lr=3e-3, eps=1e-5)
    shuffle = torch.Generator().manual_seed(7)

    for it in range(ITERS):
        O, A, P, R, adv, ret = rollout(net, env)
        n = HORIZON * ENVS
        mean = total(adv.sum(), world) / n
        std = (total((adv - mean).square().sum(), world) / (n - 1)).sqrt()
        adv = (adv - mean) / (std + 1e-8)
        done_epochs = 0
        for _ in range(EPOCHS):
            kl = torch.zeros(())
            for times in torch.randperm(HORIZON, generator=shuffle).chunk(CHUNKS):
                logp, v = net(O[times])
                new = logp.gather(-1, A[times][..., None]).squeeze(-1)
                ratio = (new - P[times]).exp()
                gain = torch.min(ratio * adv[times], ratio.clamp(1 - CLIP, 1 + CLIP) * adv[times])
                entropy = -(logp.exp() * logp).sum(-1)
                loss = (-gain + 0.5 * (v - ret[times]).square() - 0.01 * entropy).mean()
                opt.zero_grad()
                loss.backward()
                mean_gradient(net, world)
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                opt.step()
                kl += (ratio - 1 - ratio.log()).detach().mean() / CHUNKS
            done_epochs += 1
            if total(kl, world) / world > TARGET_KL:
                break
        reward = total(R.sum(), world) / n
        if rank == 0:
            print(f"iter {it} reward {reward:.5f} epochs {done_epochs} kl {kl / world:.5f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
