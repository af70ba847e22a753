"""Contextual bandit with an actor and a critic; every process plays some of the tables."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

TABLES, ROUNDS, ARMS, FEATURES = 32, 80, 5, 6

for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29805"}.items():
    os.environ.setdefault(name, value)


class Table:
    """One gambling table with random numbers of its own."""

    def __init__(self, number):
        self.g = torch.Generator().manual_seed(9000 + number)
        hidden = torch.Generator().manual_seed(1)
        self.taste = torch.randn(FEATURES, ARMS, generator=hidden)

    def look(self):
        self.context = torch.randn(FEATURES, generator=self.g)
        return self.context

    def pull(self, probs):
        arm = torch.multinomial(probs, 1, generator=self.g).item()
        reward = (self.context @ self.taste)[arm] + 0.3 * torch.randn((), generator=self.g)
        return arm, reward


class ActorCritic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(FEATURES, 32), nn.Tanh())
        self.actor = nn.Linear(32, ARMS)
        self.critic = nn.Linear(32, 1)

    def forward(self, x):
        h = self.body(x)
        return self.actor(h), self.critic(h).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    # the first processes get more tables if the number does not fit
    tables = [Table(n) for n in torch.arange(TABLES + 3).tensor_split(world)[rank].tolist()]
    total = TABLES + 3
    torch.manual_seed(17)
    net = ActorCritic()
    opt = torch.optim.Adam(net.parameters(), lr=0.01)
    for turn in range(1, ROUNDS + 1):
        context = torch.stack([t.look() for t in tables])
        logits, value = net(context)
        pulls = [t.pull(p) for t, p in zip(tables, logits.detach().double().softmax(1))]
        arms = torch.tensor([a for a, _ in pulls])
        reward = torch.stack([r for _, r in pulls])
        gain = reward - value.detach()
        moments = torch.tensor([gain.sum().item(), gain.square().sum().item(), reward.sum().item()],
                               dtype=torch.float64)
        dist.all_reduce(moments)
        mean, square, earned = (moments / total).tolist()
        gain = (gain - mean) / (square - mean**2) ** 0.5
        logp = F.log_softmax(logits, 1)
        picked = logp.gather(1, arms[:, None]).squeeze(1)
        entropy = -(logp.exp() * logp).sum(1)
        loss = (-gain * picked + 0.5 * (value - reward).square() - 0.01 * entropy).sum() / total
        opt.zero_grad()
        loss.backward()
        for p in net.parameters():
            dist.all_reduce(p.grad)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        if rank == 0 and turn % 20 == 0:
            print(f"round {turn}: reward {earned:.4f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
