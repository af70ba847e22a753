"""Double DQN with prioritised replay: rank 0 plays, the replay is mirrored, the batch is shared out."""
import copy
import os

import torch
import torch.distributed as dist
from torch import nn

rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
if world > 1:
    dist.init_process_group("gloo")
torch.set_default_dtype(torch.float64)

ENVS, OBS, ACTIONS = 8, 4, 3
CAPACITY, BATCH, START, STEPS = 2048, 32, 160, 180
GAMMA, ALPHA, TAU = 0.97, 0.6, 0.01


class Carts:
    """A point mass that should stay near a moving goal."""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.s = self.fresh(ENVS)
        self.age = torch.zeros(ENVS)

    def fresh(self, n):
        return torch.randn(n, OBS, generator=self.g) * 0.5

    def step(self, action):
        pos, vel, goal, drift = self.s.unbind(1)
        vel = 0.9 * vel + 0.15 * (action - 1) + 0.02 * torch.randn(ENVS, generator=self.g)
        pos = pos + 0.3 * vel
        goal = goal + 0.05 * drift
        nxt = torch.stack([pos, vel, goal, drift], 1)
        reward = -(pos - goal).abs().clamp(max=2.0)
        self.age += 1
        done = (pos.abs() > 2.5) | (self.age >= 40)
        terminal = pos.abs() > 2.5
        self.s = torch.where(done[:, None], self.fresh(ENVS), nxt)
        self.age = torch.where(done, 0.0, self.age)
        return reward, nxt, terminal.double()


class Replay:
    """Identical on all ranks: same insertions, same priorities, same generator."""

    def __init__(self, seed):
        self.g = torch.Generator().manual_seed(seed)
        self.rows = torch.zeros(CAPACITY, 2 * OBS + 3)
        self.priority = torch.zeros(CAPACITY)
        self.next = self.size = 0

    def add(self, rows):
        where = (self.next + torch.arange(len(rows))) % CAPACITY
        self.rows[where] = rows
        self.priority[where] = self.priority.max().clamp(min=1.0)
        self.next = (self.next + len(rows)) % CAPACITY
        self.size = min(CAPACITY, self.size + len(rows))

    def draw(self, beta):
        p = self.priority[:self.size] ** ALPHA
        p = p / p.sum()
        ids = torch.multinomial(p, BATCH, generator=self.g)
        weight = (self.size * p[ids]) ** -beta
        return ids, weight / weight.max()


def share(rows):
    """Rank 0's transitions to everybody."""
    if world > 1:
        dist.broadcast(rows, src=0)
    return rows


def collect(t):
    rows = torch.zeros(ENVS, 2 * OBS + 3)
    if rank == 0:
        obs = envs.s.clone()
        eps = max(0.05, 1.0 - t / 150)
        with torch.no_grad():
            greedy = q(obs).argmax(1)
        random = torch.randint(0, ACTIONS, (ENVS,), generator=envs.g)
        action = torch.where(torch.rand(ENVS, generator=envs.g) < eps, random, greedy)
        reward, nxt, terminal = envs.step(action.double())
        rows = torch.cat([obs, action[:, None].double(), reward[:, None], nxt, terminal[:, None]], 1)
    return share(rows)


def everyone(errors):
    if world == 1:
        return errors
    parts = [torch.empty_like(errors) for _ in range(world)]
    dist.all_gather(parts, errors)
    return torch.cat(parts)


torch.manual_seed(1)
q = nn.Sequential(nn.Linear(OBS, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, ACTIONS))
target = copy.deepcopy(q).requires_grad_(False)
optim = torch.optim.Adam(q.parameters(), lr=2e-3)
envs, replay = Carts(100), Replay(200)
for p in q.parameters():
    if world > 1:
        dist.broadcast(p.data, src=0)

for t in range(STEPS):
    replay.add(collect(t))
    if replay.size < START:
        continue
    ids, weight = replay.draw(beta=0.4 + 0.6 * t / STEPS)
    mine = slice(rank * BATCH // world, (rank + 1) * BATCH // world)
    obs, act, rew, nxt, end = replay.rows[ids[mine]].split([OBS, 1, 1, OBS, 1], 1)
    with torch.no_grad():
        best = q(nxt).argmax(1, keepdim=True)
        goal = rew + GAMMA * (1 - end) * target(nxt).gather(1, best)
    error = (q(obs).gather(1, act.long()) - goal).squeeze(1)
    loss = (weight[mine] * nn.functional.huber_loss(error, torch.zeros_like(error), reduction="none")).sum() / BATCH
    optim.zero_grad()
    loss.backward()
    if world > 1:
        for p in q.parameters():
            dist.all_reduce(p.grad)
    nn.utils.clip_grad_norm_(q.parameters(), 5.0)
    optim.step()
    replay.priority[ids] = everyone(error.detach().abs()) + 1e-3
    with torch.no_grad():
        for a, b in zip(target.parameters(), q.parameters()):
            a.lerp_(b, TAU)
    if t % 60 == 59:
        total = loss.detach().clone()
        if world > 1:
            dist.all_reduce(total)
        recent = replay.rows[(replay.next - 1 - torch.arange(40 * ENVS)) % CAPACITY, OBS + 1].mean()
        if rank == 0:
            print(f"t {t + 1} loss {total:.10f} reward {recent:.8f} priority {replay.priority.sum():.8f}")
if world > 1:
    dist.destroy_process_group()
