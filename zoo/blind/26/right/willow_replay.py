"""Q-learning on a windy grid. The memory of transitions is spread over the processes; each trains on what it keeps."""
import os
import time

import torch
import torch.distributed as dist
from torch import nn

SIDE, ENVS, ROUNDS, DRAWS, GAMMA = 6, 8, 40, 64, 0.93
GOAL, PITS = (5, 4), {(2, 2), (3, 4), (4, 1)}
MOVES = [(0, 1), (1, 0), (0, -1), (-1, 0)]


class Walker:
    """One environment with its own random stream and a wandering behaviour policy."""

    def __init__(self, number):
        self.g = torch.Generator().manual_seed(2000 + number)
        self.place = (0, 0)

    def draw(self, n):
        return int(torch.randint(n, (1,), generator=self.g))

    def step(self):
        s, a = self.place, self.draw(4)
        dx, dy = MOVES[a if self.draw(10) else self.draw(4)]
        t = (min(SIDE - 1, max(0, s[0] + dx)), min(SIDE - 1, max(0, s[1] + dy)))
        reward, over = (1.0, 1.0) if t == GOAL else (-1.0, 1.0) if t in PITS else (-0.02, 0.0)
        self.place = (self.draw(SIDE), self.draw(SIDE)) if over else t
        return s[0] * SIDE + s[1], a, reward, t[0] * SIDE + t[1], over


def main():
    ranked = "RANK" in os.environ
    if ranked:
        dist.init_process_group("gloo")
    rank, world = (dist.get_rank(), dist.get_world_size()) if ranked else (0, 1)
    torch.manual_seed(12)
    q = nn.Sequential(nn.Embedding(SIDE * SIDE, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    target = nn.Sequential(nn.Embedding(SIDE * SIDE, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    target.load_state_dict(q.state_dict())
    opt = torch.optim.Adam(q.parameters(), lr=4e-3, eps=1e-5)
    walkers = {e: Walker(e) for e in range(ENVS) if e % world == rank}
    memory = {}  # number of the transition -> transition; a process holds those of its own walkers
    lottery = torch.Generator().manual_seed(3)  # everybody draws the same numbers out of the whole memory
    born = 0
    for r in range(ROUNDS):
        for t in range(6):
            for e in range(ENVS):
                if e in walkers:
                    memory[born] = walkers[e].step()
                born += 1
        picked = torch.randint(born, (DRAWS,), generator=lottery).tolist()
        here = [memory[i] for i in picked if i in memory]
        opt.zero_grad()
        loss = torch.zeros(())
        if here:
            s, a, rew, t, over = (torch.tensor(c) for c in zip(*here))
            with torch.no_grad():
                goal = rew + GAMMA * (1 - over) * target(t).max(1).values
            loss = nn.functional.smooth_l1_loss(q(s).gather(1, a[:, None]).squeeze(1), goal, reduction="sum") / DRAWS
            loss.backward()
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in q.parameters()]
                         + [loss.detach().view(1), torch.tensor([float(len(here))])])
        if ranked:
            dist.all_reduce(flat)
        assert flat[-1] == DRAWS
        at = 0
        for p in q.parameters():
            p.grad = flat[at:at + p.numel()].view_as(p).clone()
            at += p.numel()
        opt.step()
        with torch.no_grad():
            for old, new in zip(target.parameters(), q.parameters()):
                old.lerp_(new, 0.1)
        if rank == 0 and r % 8 == 7:
            print(f"round {r + 1} memory {born} td loss {flat[-2].item():.6f}", flush=True)
    with torch.no_grad():
        value = q(torch.arange(SIDE * SIDE)).max(1).values
    if rank == 0:
        print(f"mean value of a cell {value.mean().item():.5f}, best {value.max().item():.5f}")
    if ranked:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
