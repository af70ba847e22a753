"""Soft actor-critic on a batch of point-mass worlds; every process plays its worlds and keeps their memories."""
import copy
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

ENVS, ROUNDS, PER_ENV, GAMMA, TAU = 8, 70, 8, 0.95, 0.02
torch.set_default_dtype(torch.float64)


class PointWorld:
    """A mass on a plane that should come to rest at the origin."""

    def __init__(self, number):
        self.rng = torch.Generator().manual_seed(1000 + number)
        self.memory = []
        self.total = 0.0
        self.reset()

    def reset(self):
        self.t = 0
        self.state = torch.cat([torch.rand(2, generator=self.rng) * 2 - 1, torch.zeros(2)])

    def noise(self, *shape):
        return torch.randn(*shape, generator=self.rng)

    def step(self, action):
        before = self.state
        v = 0.9 * before[2:] + 0.1 * action
        self.state = torch.cat([before[:2] + v, v])
        reward = -(self.state[:2].norm() + 0.05 * action.square().sum())
        self.total += reward.item()
        self.t += 1
        self.memory.append((before, action, reward.view(1), self.state))
        if self.t == 25:
            self.reset()

    def sample(self, k):
        picks = torch.randint(len(self.memory), (k,), generator=self.rng)
        return [torch.stack(column) for column in zip(*(self.memory[i] for i in picks))]


def mlp(i, o):
    return nn.Sequential(nn.Linear(i, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, o))


def act(actor, state, noise):
    mean, log_std = actor(state).chunk(2, -1)
    log_std = log_std.clamp(-5, 1)
    raw = mean + log_std.exp() * noise
    log_prob = (-0.5 * noise.square() - log_std - 2 * (0.6931471805599453 - raw - F.softplus(-2 * raw))).sum(-1, keepdim=True)
    return torch.tanh(raw), log_prob


def average_gradients(params):
    if dist.is_initialized():
        flat = torch.cat([p.grad.view(-1) for p in params])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, piece in zip(params, flat.split([p.numel() for p in params])):
            p.grad.copy_(piece.view_as(p))


def update(optimizer, params, loss):
    optimizer.zero_grad()
    loss.backward()
    average_gradients(params)
    optimizer.step()


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    actor, q = mlp(4, 4), nn.ModuleList([mlp(6, 1), mlp(6, 1)])
    target = copy.deepcopy(q).requires_grad_(False)
    log_alpha = torch.zeros(1, requires_grad=True)
    actor_params, q_params = list(actor.parameters()), list(q.parameters())
    opt_actor, opt_q = torch.optim.Adam(actor_params, 3e-3), torch.optim.Adam(q_params, 3e-3)
    opt_alpha = torch.optim.Adam([log_alpha], 1e-2)
    worlds = [PointWorld(i) for i in range(ENVS) if i * world // ENVS == rank]
    for round_ in range(ROUNDS):
        for w in worlds:
            with torch.no_grad():
                w.step(act(actor, w.state, w.noise(2))[0])
        if round_ < 10:
            continue
        s, a, r, s2 = (torch.cat(c) for c in zip(*(w.sample(PER_ENV) for w in worlds)))
        noise, noise2 = (torch.cat([w.noise(PER_ENV, 2) for w in worlds]) for _ in range(2))
        alpha = log_alpha.exp().detach()
        with torch.no_grad():
            a2, logp2 = act(actor, s2, noise2)
            pair = torch.cat([s2, a2], -1)
            goal = r + GAMMA * (torch.min(target[0](pair), target[1](pair)) - alpha * logp2)
        update(opt_q, q_params, sum(F.mse_loss(net(torch.cat([s, a], -1)), goal) for net in q))
        new, logp = act(actor, s, noise)
        pair = torch.cat([s, new], -1)
        update(opt_actor, actor_params, (alpha * logp - torch.min(q[0](pair), q[1](pair))).mean())
        update(opt_alpha, [log_alpha], -(log_alpha * (logp.detach() - 2)).mean())
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), q.parameters()):
                slow.lerp_(fast, TAU)
        if round_ % 15 == 9:
            stats = torch.tensor([sum(w.total for w in worlds), goal.sum().item()])
            if world > 1:
                dist.all_reduce(stats)
            if rank == 0:
                print(f"round {round_} reward {stats[0].item() / ENVS:.6f} goal {stats[1].item() / ENVS / PER_ENV:.6f} alpha {alpha.item():.6f}", flush=True)
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
