"""PPO for a pendulum, after the single-file multi-process implementations."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Normal

NUM_ENVS, NUM_STEPS, UPDATES, EPOCHS, MINIBATCHES, EPISODE = 16, 32, 5, 3, 4, 48
GAMMA, LAMBDA, CLIP, TARGET_KL = 0.97, 0.95, 0.2, 0.03


class Pendulums:
    """Environments first..last of a fixed fleet; each has its own source of start states."""

    def __init__(self, first, last):
        self.sources = [torch.Generator().manual_seed(100 + i) for i in range(first, last)]
        self.state = torch.stack([self.start(g) for g in self.sources])
        self.age = 3 * torch.arange(first, last)

    @staticmethod
    def start(g):
        return (torch.rand(2, generator=g) * 2 - 1) * torch.tensor([torch.pi, 1.0])

    def observe(self):
        angle, speed = self.state.unbind(1)
        return torch.stack([angle.cos(), angle.sin(), speed / 4], 1)

    def step(self, torque):
        angle, speed = self.state.unbind(1)
        torque = 2 * torch.tanh(torque)
        wrapped = torch.atan2(angle.sin(), angle.cos())
        reward = -(wrapped ** 2 + 0.1 * speed ** 2 + 0.001 * torque ** 2)
        speed = (speed + 0.05 * (15 * angle.sin() + 3 * torque)).clamp(-8, 8)
        self.state = torch.stack([angle + 0.05 * speed, speed], 1)
        self.age = self.age + 1
        done = self.age >= EPISODE
        for i in done.nonzero().flatten().tolist():
            self.state[i], self.age[i] = self.start(self.sources[i]), 0
        return self.observe(), reward, done


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.critic = nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.full((1,), -0.5))

    def policy(self, obs):
        mean = self.actor(obs).squeeze(-1)
        return Normal(mean, self.log_std.exp().expand_as(mean))

    def value(self, obs):
        return self.critic(obs).squeeze(-1)


def mean_over_ranks(tensor, world):
    if world > 1:
        dist.all_reduce(tensor)
        tensor /= world
    return tensor


def main():
    world, rank = int(os.getenv("WORLD_SIZE", "1")), int(os.getenv("RANK", "0"))
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters(), lr=2e-3, eps=1e-5)
    local = NUM_ENVS // world
    mine = slice(rank * local, (rank + 1) * local)
    envs = Pendulums(mine.start, mine.stop)
    exploration, shuffle = torch.Generator().manual_seed(2), torch.Generator().manual_seed(3)
    obs = envs.observe()

    for update in range(UPDATES):
        optimizer.param_groups[0]["lr"] = 2e-3 * (1 - update / UPDATES)
        keep = {k: [] for k in ("obs", "action", "logprob", "reward", "done", "value")}
        with torch.no_grad():
            for _ in range(NUM_STEPS):
                policy = agent.policy(obs)
                action = policy.mean + policy.stddev * torch.randn(NUM_ENVS, generator=exploration)[mine]
                after, reward, done = envs.step(action)
                for k, v in zip(keep, (obs, action, policy.log_prob(action), reward, done.double(), agent.value(obs))):
                    keep[k].append(v)
                obs = after
            roll = {k: torch.stack(v) for k, v in keep.items()}
            following, gae, advantages = agent.value(obs), torch.zeros(local), []
            for t in reversed(range(NUM_STEPS)):
                alive = 1 - roll["done"][t]
                delta = roll["reward"][t] + GAMMA * following * alive - roll["value"][t]
                gae = delta + GAMMA * LAMBDA * alive * gae
                following = roll["value"][t]
                advantages.insert(0, gae)
            roll["advantage"] = torch.stack(advantages)
            roll["return"] = roll["advantage"] + roll["value"]

        for epoch in range(EPOCHS):
            kls = []
            for times in torch.randperm(NUM_STEPS, generator=shuffle).chunk(MINIBATCHES):
                mb = {k: v[times].flatten(0, 1) for k, v in roll.items()}
                adv = mb["advantage"]
                moments = mean_over_ranks(torch.stack([adv.mean(), adv.pow(2).mean()]), world)
                adv = (adv - moments[0]) / ((moments[1] - moments[0] ** 2).sqrt() + 1e-8)
                policy = agent.policy(mb["obs"])
                logratio = policy.log_prob(mb["action"]) - mb["logprob"]
                ratio = logratio.exp()
                pg = torch.max(-adv * ratio, -adv * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()
                v_loss = 0.5 * (agent.value(mb["obs"]) - mb["return"]).pow(2).mean()
                loss = pg + 0.5 * v_loss - 0.005 * policy.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                flat = mean_over_ranks(torch.cat([p.grad.view(-1) for p in agent.parameters()]), world)
                offset = 0
                for p in agent.parameters():
                    p.grad.copy_(flat[offset:offset + p.numel()].view_as(p))
                    offset += p.numel()
                nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
                optimizer.step()
                kls.append(((ratio - 1) - logratio).mean().detach())
            kl = mean_over_ranks(torch.stack(kls).mean(), world)
            if kl > TARGET_KL:
                break
        score = mean_over_ranks(roll["reward"].mean(), world)
        if rank == 0:
            print(f"update {update}: reward {score:.10f} kl {kl:.10f} epochs {epoch + 1}")

    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
