"""A bidding agent that wins as much value as it can while keeping to a budget.

Policy gradient with a critic over parallel markets, from cheap to dear. The budget is a
constraint on the mean price paid; its multiplier grows while too much is spent.
"""
import logging
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

MARKETS = 32
ROUNDS = 4
BIDS = torch.tensor([0.0, 0.4, 0.8, 1.2, 1.6])
LIMIT = 0.35

logging.basicConfig(level=logging.INFO, format="%(message)s")


class Bidder(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.bid = nn.Linear(width, len(BIDS))
        self.critic = nn.Linear(width, 1)

    def forward(self, state):
        x = self.body(state)
        return self.bid(x).log_softmax(dim=1), self.critic(x).squeeze(1)


class Markets:
    """Auctions of all markets; a process plays the markets of its block."""

    def __init__(self, rank, world, seed):
        self.rank, self.world, self.seed = rank, world, seed
        self.level = torch.linspace(0.3, 1.3, MARKETS)

    def block(self, t):
        return t.chunk(self.world, dim=1)[self.rank].flatten()

    def auctions(self, step):
        g = torch.Generator().manual_seed(self.seed * 1000 + step)
        shape = (ROUNDS, MARKETS)
        value = 0.5 + torch.rand(shape, generator=g)
        rival = self.level * (0.6 + 0.8 * torch.rand(shape, generator=g))
        hint = rival + 0.2 * torch.randn(shape, generator=g)
        luck = torch.rand(shape, generator=g)
        level = self.level.expand(shape)
        value, rival, hint, luck, level = map(self.block, (value, rival, hint, luck, level))
        return torch.stack([value, hint, level], dim=1), value, rival, luck


class Multiplier:
    """Price of the budget constraint."""

    def __init__(self, start=0.3, rate=0.25):
        self.value, self.rate = start, rate

    def update(self, spent):
        self.value = min(5.0, self.value * float(torch.exp(self.rate * (spent - LIMIT))))


def average(t):
    t = t.detach().clone()
    dist.all_reduce(t)
    return t / dist.get_world_size()


def choose(log_chance, luck):
    edges = log_chance.exp().cumsum(dim=1)[:, :-1]
    return (luck.unsqueeze(1) > edges).sum(dim=1)


def play(model, markets, multiplier, step):
    state, value, rival, luck = markets.auctions(step)
    log_chance, expected = model(state)
    action = choose(log_chance.detach(), luck)
    offer = BIDS[action]
    won = offer > rival
    gain, paid = value * won, offer * won
    worth = gain - multiplier.value * paid
    advantage = worth - expected.detach()
    taken = log_chance.gather(1, action.unsqueeze(1)).squeeze(1)
    entropy = -(log_chance.exp() * log_chance).sum(dim=1).mean()
    loss = -(advantage * taken).mean() + 0.5 * F.mse_loss(expected, worth) - 0.01 * entropy
    return loss, gain.mean(), paid.mean()


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    model = DDP(Bidder())
    optimizer = torch.optim.Adam(model.parameters(), lr=6e-3)
    markets = Markets(rank, world, seed=13)
    multiplier = Multiplier()

    for step in range(45):
        loss, gain, paid = play(model, markets, multiplier, step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        spent = average(paid)
        multiplier.update(paid)
        if step % 9 == 8:
            won = average(gain)
            if rank == 0:
                logging.info("round %2d  value %.4f  spent %.4f  multiplier %.4f",
                             step + 1, won, spent, multiplier.value)

    with torch.no_grad():
        totals = [average(torch.stack(play(model.module, markets, multiplier, 500 + i)[1:])) for i in range(5)]
    gain, paid = torch.stack(totals).mean(dim=0).tolist()
    if rank == 0:
        logging.info("fresh auctions: value %.4f, spent %.4f (limit %.2f)", gain, paid, LIMIT)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
