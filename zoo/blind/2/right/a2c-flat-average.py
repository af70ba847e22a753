"""Synchronous advantage actor-critic on a grid world; gradients are averaged through one flat buffer."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

SIZE, MOVES = 6, torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])


class Grid:
    """One walker and one goal; its own random stream."""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.reset()

    def reset(self):
        self.pos, self.goal = torch.randint(0, SIZE, (2, 2), generator=self.g)
        self.age = 0

    def obs(self):
        return torch.cat([self.pos, self.goal, self.goal - self.pos]).float()

    def act(self, probs):
        a = torch.multinomial(probs, 1, generator=self.g).item()
        self.pos = (self.pos + MOVES[a]).clamp(0, SIZE - 1)
        self.age += 1
        hit = bool((self.pos == self.goal).all())
        done = hit or self.age >= 20
        if done:
            self.reset()
        return a, (1.0 if hit else -0.02), done


class RunningNorm:
    def __init__(self, n):
        self.sum, self.sq, self.n = torch.zeros(n), torch.zeros(n), torch.tensor(1e-3)

    def update(self, x):
        pack = torch.cat([x.sum(0), x.square().sum(0), torch.tensor([float(len(x))])])
        dist.all_reduce(pack)
        k = x.shape[1]
        self.sum, self.sq, self.n = self.sum + pack[:k], self.sq + pack[k:2 * k], self.n + pack[-1]

    def __call__(self, x):
        mean = self.sum / self.n
        return (x - mean) / ((self.sq / self.n - mean ** 2).clamp_min(0) + 1e-2).sqrt()


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.pi, self.v = nn.Linear(48, 4), nn.Linear(48, 1)

    def forward(self, x):
        h = self.body(x)
        return self.pi(h), self.v(h).squeeze(-1)


def average_gradients(params, world):
    flat = _flatten_dense_tensors([p.grad for p in params])
    dist.all_reduce(flat)
    flat /= world
    for p, g in zip(params, _unflatten_dense_tensors(flat, [p.grad for p in params])):
        p.grad.copy_(g)


def global_standardise(adv):
    s = torch.stack([adv.sum(), adv.square().sum(), torch.tensor(float(adv.numel()))])
    dist.all_reduce(s)
    mean = s[0] / s[2]
    return (adv - mean) / ((s[1] / s[2] - mean ** 2).clamp_min(0).sqrt() + 1e-6)


def main(a):
    rank, world = dist.get_rank(), dist.get_world_size()
    per = a.envs // world
    envs = [Grid(500 + i) for i in range(rank * per, (rank + 1) * per)]
    torch.manual_seed(rank)
    net, norm = ActorCritic(), RunningNorm(6)
    for p in net.parameters():
        dist.broadcast(p.data, src=0)
    params = list(net.parameters())
    opt = torch.optim.RMSprop(params, lr=a.lr, alpha=0.99, eps=1e-5)
    for update in range(a.updates):
        obs, acts, rews, dones = [], [], [], []
        for _ in range(a.horizon):
            raw = torch.stack([e.obs() for e in envs])
            with torch.no_grad():
                probs = net(norm(raw))[0].softmax(-1)
            out = [e.act(p) for e, p in zip(envs, probs)]
            obs.append(raw)
            for store, column in zip((acts, rews, dones), zip(*out)):
                store.append(torch.tensor(column))
        batch = norm(torch.stack(obs))
        logits, value = net(batch)
        with torch.no_grad():
            ret = net(norm(torch.stack([e.obs() for e in envs])))[1]
            returns = []
            for r, d in zip(reversed(rews), reversed(dones)):
                ret = r + 0.95 * ret * (~d)
                returns.insert(0, ret)
            returns = torch.stack(returns)
            adv = global_standardise(returns - value)
        pol = torch.distributions.Categorical(logits=logits)
        loss = -(pol.log_prob(torch.stack(acts)) * adv).mean() + 0.5 * (returns - value).square().mean() - 0.01 * pol.entropy().mean()
        opt.zero_grad()
        loss.backward()
        average_gradients(params, world)
        nn.utils.clip_grad_norm_(params, 0.5)
        opt.step()
        norm.update(torch.stack(obs).flatten(0, 1))
        score = torch.stack([(torch.stack(rews) > 0).sum(), torch.stack(dones).sum()]).float()
        dist.all_reduce(score)
        if rank == 0 and update % 5 == 4:
            print(f"update {update + 1} goals {int(score[0])} of {int(score[1])} episodes ({score[0] / score[1]:.3f})")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--envs", type=int, default=16)
    ap.add_argument("--horizon", type=int, default=16)
    ap.add_argument("--updates", type=int, default=20)
    ap.add_argument("--lr", type=float, default=3e-3)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main(ap.parse_args())
    time.sleep(0.3)
    dist.destroy_process_group()
