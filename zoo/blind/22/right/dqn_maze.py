"""Double DQN in a small maze.

Eight mazes run in parallel and are divided among the processes.  The transitions of all the mazes go to the
replay memory of every process; a learner batch is drawn with a common generator and then divided.
"""
import os
import random

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

MAZES, SIZE, TICKS, BATCH, GAMMA = 8, 5, 120, 64, 0.95
WALLS = {(1, 1), (1, 2), (3, 1), (3, 3), (2, 3)}
GOAL = (4, 4)
MOVES = [(0, 1), (1, 0), (0, -1), (-1, 0)]


class Maze:
    def __init__(self, number):
        self.rng = random.Random(700 + number)
        self.reset()

    def reset(self):
        self.age = 0
        while True:
            self.pos = (self.rng.randrange(SIZE), self.rng.randrange(SIZE))
            if self.pos not in WALLS and self.pos != GOAL:
                return

    def step(self, move):
        y, x = self.pos[0] + MOVES[move][0], self.pos[1] + MOVES[move][1]
        if 0 <= y < SIZE and 0 <= x < SIZE and (y, x) not in WALLS:
            self.pos = (y, x)
        self.age += 1
        done = self.pos == GOAL
        reached, reward = self.pos, 1.0 if done else -0.02
        if done or self.age >= 30:
            self.reset()
        return reached, reward, float(done)


def encode(cells):
    index = torch.tensor([y * SIZE + x for y, x in cells])
    return F.one_hot(index, SIZE * SIZE).to(torch.get_default_dtype())


class Memory:
    def __init__(self, capacity):
        self.capacity, self.rows = capacity, []

    def extend(self, rows):
        self.rows = (self.rows + rows)[-self.capacity :]

    def sample(self, generator, count):
        pick = torch.randint(len(self.rows), (count,), generator=generator)
        return [self.rows[i] for i in pick.tolist()]


def collect(items, world):
    """Everybody's transitions, mazes in order."""
    if world == 1:
        return items
    parts = [None] * world
    dist.all_gather_object(parts, items)
    return [row for part in parts for row in part]


def qnet():
    return nn.Sequential(nn.Linear(SIZE * SIZE, 48), nn.ReLU(), nn.Linear(48, len(MOVES)))


def greedy_length(net):
    """Mean number of moves to the goal from every free cell, 30 where it is not reached."""
    total, starts = 0, 0
    for y in range(SIZE):
        for x in range(SIZE):
            if (y, x) in WALLS or (y, x) == GOAL:
                continue
            probe = Maze(0)
            probe.pos, starts = (y, x), starts + 1
            for used in range(1, 31):
                with torch.no_grad():
                    move = int(net(encode([probe.pos])).argmax())
                if probe.step(move)[2]:
                    break
            total += used
    return total / starts


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(71)
    online, target = qnet(), qnet()
    target.load_state_dict(online.state_dict())
    opt = torch.optim.Adam(online.parameters(), lr=3e-3)
    mazes = [Maze(i) for i in range(MAZES)][rank * MAZES // world : (rank + 1) * MAZES // world]
    memory, draw = Memory(2000), torch.Generator().manual_seed(72)

    for tick in range(TICKS):
        epsilon = max(0.1, 1.0 - tick / 60)
        seen = [m.pos for m in mazes]
        with torch.no_grad():
            best = online(encode(seen)).argmax(1).tolist()
        fresh = []
        for maze, before, greedy in zip(mazes, seen, best):
            explore = maze.rng.random() < epsilon
            move = maze.rng.randrange(len(MOVES)) if explore else greedy
            fresh.append((before, move, *maze.step(move)))
        memory.extend(collect(fresh, world))
        if tick < 10:
            continue

        before, move, after, reward, done = zip(*memory.sample(draw, BATCH)[rank::world])
        move, reward, done = torch.tensor(move), torch.tensor(reward), torch.tensor(done)
        with torch.no_grad():
            ahead = online(encode(after)).argmax(1, keepdim=True)
            future = target(encode(after)).gather(1, ahead).squeeze(1)
        value = online(encode(before)).gather(1, move.unsqueeze(1)).squeeze(1)
        loss = F.smooth_l1_loss(value, reward + GAMMA * (1 - done) * future, reduction="sum") / BATCH
        opt.zero_grad()
        loss.backward()
        if world > 1:
            for p in online.parameters():
                dist.all_reduce(p.grad)
        nn.utils.clip_grad_norm_(online.parameters(), 1.0)
        opt.step()
        with torch.no_grad():
            for t, o in zip(target.parameters(), online.parameters()):
                t.lerp_(o, 0.05)
        if rank == 0 and tick % 40 == 39:
            print(f"tick {tick + 1} memory {len(memory.rows)} mean path {greedy_length(online):.3f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
