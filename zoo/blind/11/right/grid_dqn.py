import copy
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29839")

SIDE, GOAL = 3, (2, 2)
MOVES = [(0, 1), (1, 0), (0, -1), (-1, 0)]


class Grid:
    def __init__(self):
        self.at = (0, 0)
        self.age = 0

    def step(self, move):
        dx, dy = MOVES[move]
        self.at = (min(max(self.at[0] + dx, 0), SIDE - 1), min(max(self.at[1] + dy, 0), SIDE - 1))
        self.age += 1
        won = self.at == GOAL
        over = won or self.age >= 20
        here = self.at
        if over:
            self.__init__()
        return here, float(won) - 0.02, won


def code(at):
    v = torch.zeros(2 * SIDE)
    v[at[0]] = 1
    v[SIDE + at[1]] = 1
    return v


class Agent:
    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        torch.manual_seed(16)
        self.net = nn.Sequential(nn.Linear(2 * SIDE, 32), nn.Tanh(), nn.Linear(32, 4)).double()
        self.target = copy.deepcopy(self.net)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.5)
        self.luck = torch.Generator().manual_seed(70)
        self.memory = []
        self.worlds = [Grid() for _ in range(4)]

    def play(self, curious):
        for grid in self.worlds:
            s = code(grid.at)
            with torch.no_grad():
                move = int(self.net(s.double()).argmax())
            if torch.rand((), generator=self.luck) < curious:
                move = int(torch.randint(4, (), generator=self.luck))
            at, reward, won = grid.step(move)
            self.memory.append((s, move, reward, code(at), won))

    def learn(self, batch=32):
        picks = torch.randint(len(self.memory), (batch,), generator=self.luck)[self.rank::self.world]
        s, move, reward, after, won = zip(*(self.memory[i] for i in picks))
        s, after = torch.stack(s).double(), torch.stack(after).double()
        with torch.no_grad():
            best = self.target(after).max(1).values
            goal = torch.tensor(reward) + 0.9 * best * ~torch.tensor(won)
        value = self.net(s)[torch.arange(len(s)), list(move)]
        loss = F.smooth_l1_loss(value, goal, reduction="sum") / batch
        self.opt.zero_grad()
        loss.backward()
        for p in self.net.parameters():
            dist.all_reduce(p.grad)
        self.opt.step()
        return loss.detach()


def main():
    dist.init_process_group("gloo")
    agent = Agent(dist.get_rank(), dist.get_world_size())
    for turn in range(120):
        agent.play(curious=max(0.1, 1 - turn / 80))
        loss = agent.learn()
        if turn % 10 == 9:
            agent.target.load_state_dict(agent.net.state_dict())
        if turn % 30 == 29:
            dist.all_reduce(loss)
            wins = sum(m[4] for m in agent.memory)
            if agent.rank == 0:
                print(f"turn {turn + 1}: loss {loss.item():.6f}, goals {wins}", flush=True)
    net = agent.net
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
