"""Actor-critic that keeps a drifting ball at the centre. Environments are spread over the processes; one restart on the way."""
import io
import os

import torch
import torch.distributed as dist
import torch.nn as nn

ENVS, HORIZON, GAMMA, SIGMA = 8, 16, 0.95, 0.3


class Ball:
    """Keeps its own random numbers: wind, resets and the exploration noise."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)
        self.state = None
        self.reset()

    def reset(self):
        self.state = torch.randn(2, generator=self.gen)
        self.age = 0

    def noise(self):
        return torch.randn((), generator=self.gen)

    def act(self, force):
        place, speed = self.state
        wind = 0.1 * torch.randn((), generator=self.gen)
        speed = 0.9 * speed + 0.3 * force.clamp(-2, 2) + wind
        place = place + 0.3 * speed
        self.state = torch.stack([place, speed])
        self.age += 1
        reward = -place.abs() - 0.05 * force.abs()
        if self.age >= 25 or place.abs() > 4:
            self.reset()
        return reward

    def state_dict(self):
        return {"state": self.state.clone(), "age": self.age, "gen": self.gen.get_state()}

    def load_state_dict(self, saved):
        self.state, self.age = saved["state"].clone(), saved["age"]
        self.gen.set_state(saved["gen"])


class Trainer:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        per = ENVS // world
        self.first = rank * per
        self.envs = [Ball(seed=300 + self.first + i) for i in range(per)]
        torch.manual_seed(9)
        self.actor = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.params = [*self.actor.parameters(), *self.critic.parameters()]
        self.opt = torch.optim.Adam(self.params, lr=0.01)

    def update(self):
        seen, done, rewards = [], [], []
        for _ in range(HORIZON):
            obs = torch.stack([e.state for e in self.envs])
            with torch.no_grad():
                mean = self.actor(obs)[:, 0]
            action = mean + SIGMA * torch.stack([e.noise() for e in self.envs])
            seen.append(obs)
            done.append(action)
            rewards.append(torch.stack([e.act(a) for e, a in zip(self.envs, action)]))
        with torch.no_grad():
            ahead = self.critic(torch.stack([e.state for e in self.envs]))[:, 0]
        targets = []
        for r in reversed(rewards):
            ahead = r + GAMMA * ahead
            targets.insert(0, ahead)
        obs, action, target = torch.cat(seen), torch.cat(done), torch.cat(targets)
        value = self.critic(obs)[:, 0]
        logp = -((action - self.actor(obs)[:, 0]) / SIGMA).pow(2) / 2
        loss = -(logp * (target - value.detach())).mean() + 0.5 * (target - value).pow(2).mean()
        self.opt.zero_grad()
        loss.backward()
        reward = torch.stack(rewards).mean()
        if self.world > 1:
            for p in self.params:
                dist.all_reduce(p.grad)
                p.grad /= self.world
            dist.all_reduce(reward)
        self.opt.step()
        return reward.item() / self.world

    def save(self):
        parts = [[e.state_dict() for e in self.envs]]
        if self.world > 1:
            parts = [None] * self.world
            dist.all_gather_object(parts, [e.state_dict() for e in self.envs])
        envs = [e for part in parts for e in part]
        file = io.BytesIO()
        torch.save({"actor": self.actor.state_dict(), "critic": self.critic.state_dict(),
                    "opt": self.opt.state_dict(), "envs": envs}, file)
        return file.getvalue()

    def load(self, data):
        saved = torch.load(io.BytesIO(data))
        self.actor.load_state_dict(saved["actor"])
        self.critic.load_state_dict(saved["critic"])
        self.opt.load_state_dict(saved["opt"])
        for env, state in zip(self.envs, saved["envs"]):
            env.load_state_dict(state)


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    trainer = Trainer(rank, world)
    for i in range(24):
        if i == 12:
            data = trainer.save()
            trainer = Trainer(rank, world)
            trainer.load(data)
        reward = trainer.update()
        if rank == 0 and i % 4 == 3:
            print(f"update {i + 1:2d} mean reward {reward:.9f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
