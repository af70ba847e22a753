"""Actor-critic for a ferry that must hold its lane in a cross current.

Eight environments with their own random numbers are dealt over the processes;
advantages are normalised with the mean and deviation of all of them."""
import os
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

ENVS, HORIZON, UPDATES = 8, 20, 16
ACTIONS = np.array([-0.4, 0.0, 0.4])


class Ferry:
    def __init__(self, number):
        self.rng = np.random.default_rng(9000 + number)       # weather of this environment
        self.dice = np.random.default_rng(7000 + number)      # actions of this environment
        self.reset()

    def reset(self):
        self.y, self.v, self.t = self.rng.uniform(-1, 1), 0.0, 0
        self.current = self.rng.normal(0, 0.15)

    def see(self):
        return np.array([self.y, self.v, self.t / 30], dtype=np.float64)

    def act(self, a):
        self.v = 0.8 * self.v + ACTIONS[a] * 0.5 + self.current * 0.3 + self.rng.normal(0, 0.02)
        self.y += 0.3 * self.v
        self.t += 1
        sunk = abs(self.y) > 2
        reward = 1.0 - abs(self.y) - (3.0 if sunk else 0.0)
        done = sunk or self.t >= 30
        if done:
            self.reset()
        return reward, done


def total(values):
    t = torch.as_tensor(values, dtype=torch.float64)
    if dist.is_initialized():
        dist.all_reduce(t)
    return t


rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if "RANK" in os.environ:
    dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)
torch.manual_seed(2)
actor = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 3))
critic = nn.Sequential(nn.Linear(3, 24), nn.Tanh(), nn.Linear(24, 1))
params = [*actor.parameters(), *critic.parameters()]
opt = torch.optim.Adam(params, lr=0.01)
fleet = [Ferry(i) for i in range(ENVS) if i % world == rank]
count = ENVS * HORIZON

for update in range(UPDATES):
    seen, acts, rews, dones = [], [], [], []
    for _ in range(HORIZON):
        obs = torch.tensor(np.stack([f.see() for f in fleet]))
        with torch.no_grad():
            cdf = actor(obs).softmax(-1).cumsum(-1).numpy()
        a = [min(2, int((f.dice.random() > c).sum())) for f, c in zip(fleet, cdf)]
        out = [f.act(i) for f, i in zip(fleet, a)]
        seen.append(obs)
        acts.append(a)
        rews.append([r for r, _ in out])
        dones.append([d for _, d in out])
    obs, acts = torch.stack(seen), torch.tensor(acts)
    rews, dones = torch.tensor(rews), torch.tensor(dones)
    with torch.no_grad():
        running = critic(torch.tensor(np.stack([f.see() for f in fleet])))[:, 0]
    returns = torch.empty_like(rews)
    for t in reversed(range(HORIZON)):
        running = rews[t] + 0.95 * running * (~dones[t])
        returns[t] = running
    value = critic(obs)[..., 0]
    adv = (returns - value).detach()
    s = total([adv.sum().item(), adv.square().sum().item()]) / count
    adv = (adv - s[0]) / (s[1] - s[0] ** 2).sqrt()
    logp = actor(obs).log_softmax(-1)
    policy = -(logp.gather(-1, acts[..., None])[..., 0] * adv).sum()
    entropy = -(logp.exp() * logp).sum()
    loss = (policy + 0.5 * (value - returns).square().sum() - 0.01 * entropy) / count
    opt.zero_grad()
    loss.backward()
    for p in params:
        p.grad.copy_(total(p.grad))
    nn.utils.clip_grad_norm_(params, 0.5)
    opt.step()
    reward, ends = (total([rews.sum().item(), dones.sum().item()])).tolist()
    if rank == 0 and update % 4 == 3:
        print(f"update {update + 1:2d} reward/step {reward / count:+.5f} episodes {ends:.0f}", flush=True)
time.sleep(0.3)
if dist.is_initialized():
    dist.destroy_process_group()
