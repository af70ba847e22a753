"""Q-learning in a small maze from a fixed store of random moves, with a slowly followed target net."""
import copy
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

SIZE, GAMMA, BATCH, STEPS, FOLLOW = 5, 0.9, 64, 120, 10
MOVES = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])
WALLS = {(1, 1), (1, 2), (3, 3), (2, 4)}


def store(count=3000, seed=8):
    g = torch.Generator().manual_seed(seed)
    place = torch.randint(SIZE, (count, 2), generator=g)
    move = torch.randint(4, (count,), generator=g)
    after = (place + MOVES[move]).clamp(0, SIZE - 1)
    for i in range(count):
        if tuple(after[i].tolist()) in WALLS:
            after[i] = place[i]
    done = (after == SIZE - 1).all(1).float()
    return place, move, done - 0.02, after, done


def features(place):
    return torch.cat([F.one_hot(place[:, 0], SIZE), F.one_hot(place[:, 1], SIZE)], 1).float()


class QNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2 * SIZE, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, place):
        return self.body(features(place))


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29717")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    place, move, reward, after, done = store()
    torch.manual_seed(40)
    q = DDP(QNet())
    target = copy.deepcopy(q.module).requires_grad_(False)
    opt = torch.optim.Adam(q.parameters(), lr=5e-3)
    draw = torch.Generator().manual_seed(6)

    for step in range(1, STEPS + 1):
        i = torch.randint(len(move), (BATCH,), generator=draw)[rank::world]
        with torch.no_grad():
            goal = reward[i] + GAMMA * (1 - done[i]) * target(after[i]).max(1).values
        value = q(place[i]).gather(1, move[i, None]).squeeze(1)
        loss = F.smooth_l1_loss(value, goal)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % FOLLOW == 0 and rank == 0:
            target.load_state_dict(q.module.state_dict())
            if step % 30 == 0:
                with torch.no_grad():
                    start = q.module(torch.zeros(1, 2, dtype=torch.long)).max().item()
                print(f"step {step}: value of the start {start:.5f}", flush=True)

    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
