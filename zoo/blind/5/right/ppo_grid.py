"""PPO on a grid world; environments are numbered globally and dealt out to the processes."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributions import Categorical, kl_divergence
from torch.nn.parallel import DistributedDataParallel as DDP

SIZE, MOVES = 5, torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])


class Grid:
    """Walk to the goal: -0.05 per move, +1 at the goal, which then jumps to a new place."""

    def __init__(self, number):
        self.g = torch.Generator().manual_seed(9000 + number)
        self.pos, self.goal = self.cell(), self.cell()

    def cell(self):
        return torch.randint(0, SIZE, (2,), generator=self.g)

    def view(self):
        return torch.cat([self.pos, self.goal, self.goal - self.pos]).float() / SIZE

    def choose(self, probs):
        return int(torch.multinomial(probs, 1, generator=self.g))

    def move(self, action):
        self.pos = (self.pos + MOVES[action]).clamp(0, SIZE - 1)
        if torch.equal(self.pos, self.goal):
            self.goal = self.cell()
            return 1.0
        return -0.05


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh())
        self.pi, self.v = nn.Linear(48, 4), nn.Linear(48, 1)

    def forward(self, s):
        h = self.body(s)
        return self.pi(h), self.v(h).squeeze(-1)


@torch.no_grad()
def rollout(net, envs, horizon, gamma=0.95, lam=0.9):
    states, actions, rewards, values, logits = [], [], [], [], []
    for _ in range(horizon):
        s = torch.stack([e.view() for e in envs])
        out, v = net(s)
        a = [e.choose(p) for e, p in zip(envs, out.softmax(1))]
        states.append(s), values.append(v), logits.append(out), actions.append(torch.tensor(a))
        rewards.append(torch.tensor([e.move(i) for e, i in zip(envs, a)]))
    following = net(torch.stack([e.view() for e in envs]))[1]
    adv, running = [], torch.zeros(len(envs))
    for r, v in zip(reversed(rewards), reversed(values)):
        running = r + gamma * following - v + gamma * lam * running
        adv.insert(0, running)
        following = v
    states, actions, rewards, values, logits, adv = (torch.cat(c) for c in
                                                     (states, actions, rewards, values, logits, adv))
    return states, actions, adv, adv + values, logits, rewards


def group_mean(t, world):
    t = t.clone()
    dist.all_reduce(t)
    return t / world


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--envs", type=int, default=16)
    ap.add_argument("--horizon", type=int, default=12)
    ap.add_argument("--rounds", type=int, default=10)
    ap.add_argument("--passes", type=int, default=4)
    ap.add_argument("--max-kl", type=float, default=0.01)
    args = ap.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    net = DDP(ActorCritic())
    opt = torch.optim.Adam(net.parameters(), lr=6e-3)
    envs = [Grid(i) for i in range(args.envs)[rank::world]]
    for turn in range(args.rounds):
        s, a, adv, ret, old, rewards = rollout(net.module, envs, args.horizon)
        mean = group_mean(adv.mean(), world)
        adv = (adv - mean) / (group_mean((adv - mean).square().mean(), world).sqrt() + 1e-6)
        before = Categorical(logits=old)
        for used in range(args.passes):
            logits, v = net(s)
            now = Categorical(logits=logits)
            ratio = (now.log_prob(a) - before.log_prob(a)).exp()
            gain = torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            loss = -gain + 0.5 * (v - ret).square().mean() - 0.01 * now.entropy().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            if group_mean(kl_divergence(before, now).mean().detach(), world) > args.max_kl:
                break
        income = group_mean(rewards.mean(), world).item()
        if rank == 0:
            print(f"round {turn} reward per move {income:.4f} after {used + 1} passes")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
