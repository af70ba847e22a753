"""Reinforcement learning on torch.distributed.rpc: an agent with the policy, observers with the game.

    rank 0, agent      play ──────────────▶ rank 1, 2, …, observers
                       act(states)  ◀──────      a call for every move, answered for all observers at once

samestep run -n 3 examples/rpc_reinforcement.py
samestep run -n 1 examples/rpc_reinforcement.py        # all observers live beside the agent

A ball falls, and a paddle moves below. One forward pass answers four observers: the same bits on any number of ranks.
"""

import hashlib
import os
import threading

import torch
from torch import nn
from torch.distributed import rpc

COLUMNS, MOVES, OBSERVERS, GAMES, ROUNDS = 7, 6, 4, 64, 50


class Agent:
    """Has the policy. It answers the observers of one move with one forward pass."""

    def __init__(self):
        torch.manual_seed(0)
        self.policy = nn.Sequential(nn.Linear(2 * COLUMNS, 32), nn.Tanh(), nn.Linear(32, 3))
        self.optimizer = torch.optim.Adam(self.policy.parameters(), lr=0.05)
        self.lock, self.asked, self.chosen, self.moves = threading.Lock(), {}, torch.futures.Future(), []

    @rpc.functions.async_execution
    def act(self, observer, states):
        """Takes the states of an observer's games; the future holds their actions: 0, 1 or 2."""
        with self.lock:
            self.asked[observer], chosen = states, self.chosen
            if len(self.asked) == OBSERVERS:
                everybodys = torch.stack([self.asked.pop(number) for number in range(OBSERVERS)])
                actions = torch.distributions.Categorical(logits=self.policy(everybodys)).sample()
                self.moves.append((everybodys, actions))
                self.chosen = torch.futures.Future()
                chosen.set_result(actions)
        return chosen.then(lambda actions: actions.value()[observer])

    def learn(self, rewards):
        """Makes what has led to more than the mean reward likelier (REINFORCE)."""
        states, actions = map(torch.stack, zip(*self.moves, strict=True))
        likely = torch.distributions.Categorical(logits=self.policy(states)).log_prob(actions).sum(0)
        self.optimizer.zero_grad()
        (-likely * (rewards - rewards.mean())).mean().backward()
        self.optimizer.step()
        self.moves.clear()


def play(agent, observer, turn):
    """Plays on an observer's rank; returns 1 for each game in which the ball was caught, 0 for the others."""
    ball, paddle = torch.randint(COLUMNS, (2, GAMES), generator=torch.Generator().manual_seed(4 * turn + observer))
    for _ in range(MOVES):
        states = torch.cat([nn.functional.one_hot(each, COLUMNS) for each in (ball, paddle)], dim=1).float()
        paddle = (paddle + agent.rpc_sync().act(observer, states) - 1).clamp(0, COLUMNS - 1)
    return (ball == paddle).float()


def main(homes):
    """Is the agent: lets the observers on the ranks of these names play, and learns."""
    agent = Agent()
    for turn in range(ROUNDS):
        calls = [(homes[each % len(homes)], play, (rpc.RRef(agent), each, turn)) for each in range(OBSERVERS)]
        rewards = torch.stack(torch.futures.wait_all([rpc.rpc_async(*call) for call in calls]))
        agent.learn(rewards)
    weights = hashlib.sha256(nn.utils.parameters_to_vector(agent.policy.parameters()).detach().numpy()).hexdigest()
    print(f"on {', '.join(homes)}: {rewards.mean():.0%} of the last balls were caught; weights {weights[:16]}")


if __name__ == "__main__":
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    rpc.init_rpc(f"observer{rank}" if rank else "agent", rank=rank, world_size=size)
    if rank == 0:
        main([f"observer{each}" for each in range(1, size)] or ["agent"])
    rpc.shutdown()  # serves calls until all ranks are here
