"""PPO on a batch of balancing poles; the environments are dealt out to the workers."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

ENVS, HORIZON, ROUNDS, EPOCHS, SLICES = 16, 24, 5, 3, 4
GAMMA, LAMBDA, CLIP, TARGET_KL = 0.97, 0.9, 0.2, 0.02


class Poles:
    """Linearised poles with gusts; each one has its own random stream."""

    def __init__(self, numbers):
        self.streams = [torch.Generator().manual_seed(40_000 + i) for i in numbers]
        self.state = torch.stack([self.fresh(g) for g in self.streams])
        self.age = torch.zeros(len(numbers))

    def fresh(self, gen):
        return 0.1 * torch.randn(4, generator=gen)

    def uniform(self):
        return torch.stack([torch.rand((), generator=g) for g in self.streams])

    def step(self, push):
        x, v, a, w = self.state.unbind(1)
        gust = torch.stack([torch.randn((), generator=g) for g in self.streams])
        force = 2.0 * push - 1.0
        v = v + 0.1 * force
        w = w + 0.1 * (3.0 * torch.sin(a) - 1.5 * force + 0.5 * gust)
        self.state = torch.stack([x + 0.1 * v, v, a + 0.1 * w, w], 1)
        self.age += 1
        fell = (self.state[:, 2].abs() > 0.6) | (self.state[:, 0].abs() > 2.4)
        done = fell | (self.age >= 60)
        for i in done.nonzero().flatten().tolist():
            self.state[i] = self.fresh(self.streams[i])
            self.age[i] = 0
        return 1.0 - fell.to(self.state.dtype), done


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())
        self.policy, self.value = nn.Linear(32, 1), nn.Linear(32, 1)

    def forward(self, s):
        h = self.body(s)
        return self.policy(h).squeeze(-1), self.value(h).squeeze(-1)


def log_prob(logit, action):
    return -nn.functional.binary_cross_entropy_with_logits(logit, action, reduction="none")


@torch.no_grad()
def rollout(net, env):
    steps = []
    for _ in range(HORIZON):
        state = env.state.clone()
        logit, value = net(state)
        action = (env.uniform() < torch.sigmoid(logit)).to(state.dtype)
        reward, done = env.step(action)
        steps.append((state, action, log_prob(logit, action), value, reward, done))
    states, actions, logps, values, rewards, dones = (torch.stack(c) for c in zip(*steps))
    running, following = torch.zeros_like(values[0]), net(env.state)[1]
    advantages = torch.zeros_like(values)
    for t in reversed(range(HORIZON)):
        alive = (~dones[t]).to(values.dtype)
        delta = rewards[t] + GAMMA * alive * following - values[t]
        running = delta + GAMMA * LAMBDA * alive * running
        advantages[t], following = running, values[t]
    return states, actions, logps, advantages, advantages + values, rewards


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")

    def total(*values):
        t = torch.stack(list(values))
        if world > 1:
            dist.all_reduce(t)
        return t

    torch.set_default_dtype(torch.float64)
    torch.manual_seed(14)
    model = ActorCritic()
    if world > 1:
        model = DDP(model)
    net = model.module if world > 1 else model
    optimizer = torch.optim.Adam(model.parameters(), lr=4e-3, eps=1e-5)
    env = Poles(range(rank, ENVS, world))
    n = ENVS * HORIZON
    history, updates = [], 0

    for round_ in range(ROUNDS):
        states, actions, logps, adv, returns, rewards = rollout(net, env)
        s, s2 = total(adv.sum(), adv.square().sum())
        mean = s / n
        adv = (adv - mean) / (((s2 - n * mean ** 2) / (n - 1)).sqrt() + 1e-8)
        history.append(total(rewards.sum())[0] / n)

        for epoch in range(EPOCHS):
            gen = torch.Generator().manual_seed(1000 * round_ + epoch)
            for times in torch.randperm(HORIZON, generator=gen).chunk(SLICES):
                logit, value = model(states[times])
                ratio = (log_prob(logit, actions[times]) - logps[times]).exp()
                gain = torch.min(ratio * adv[times], ratio.clamp(1 - CLIP, 1 + CLIP) * adv[times]).mean()
                p = torch.sigmoid(logit)
                entropy = -(p * nn.functional.logsigmoid(logit) + (1 - p) * nn.functional.logsigmoid(-logit)).mean()
                loss = -gain + 0.5 * (value - returns[times]).square().mean() - 0.01 * entropy
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(net.parameters(), 0.5)
                optimizer.step()
                updates += 1
            with torch.no_grad():
                drift = log_prob(net(states)[0], actions) - logps
                kl = total((drift.exp() - 1 - drift).sum())[0] / n
            if kl > TARGET_KL:
                break

    if rank == 0:
        print("reward per step " + " ".join(f"{h.item():.6f}" for h in history))
        print(f"{updates} updates, policy norm {net.policy.weight.norm().item():.10f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
