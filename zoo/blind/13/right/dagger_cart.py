"""DAgger: a small net learns to balance a pole from a linear expert that corrects it along its own path.

Carts are shared out, their episodes have unequal lengths, and what they saw is collected on every process.
"""
import math

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

CARTS, HORIZON, ROUNDS = 12, 60, 5
BATCH, STEPS_A_ROUND = 60, 10
EXPERT = torch.tensor([1.0, 2.2, 26.0, 5.5], dtype=torch.float64)


def advance(state, force, push):
    x, v, angle, spin = state
    temp = (force + 0.05 * spin ** 2 * math.sin(angle)) / 1.1
    spin_acc = (9.8 * math.sin(angle) - math.cos(angle) * temp) / (0.5 * (4 / 3 - 0.1 * math.cos(angle) ** 2 / 1.1))
    acc = temp - 0.05 * spin_acc * math.cos(angle) / 1.1
    return [x + 0.04 * v, v + 0.04 * acc, angle + 0.04 * spin, spin + 0.04 * (spin_acc + push)]


@torch.no_grad()
def episode(net, cart, round_):
    """The expert drives some of the time (less in every round), and is asked all of the time."""
    g = torch.Generator().manual_seed(cart * 100 + round_)
    state = (0.3 * (torch.rand(4, generator=g, dtype=torch.float64) - 0.5)).tolist()
    seen, told = [], []
    for _ in range(HORIZON):
        obs = torch.tensor(state, dtype=torch.float64)
        advice = torch.tanh(EXPERT @ obs / 10)
        by_expert = torch.rand((), generator=g).item() < 0.6 ** round_
        action = advice.item() if by_expert else net(obs[None]).item()
        seen.append(obs)
        told.append(advice)
        state = advance(state, 10 * action, 7 * torch.randn((), generator=g).item())
        if abs(state[0]) > 2.4 or abs(state[2]) > 0.5:
            break
    return cart, torch.stack(seen), torch.stack(told)


class Memory:
    def __init__(self):
        self.seen, self.told = torch.empty(0, 4, dtype=torch.float64), torch.empty(0, dtype=torch.float64)

    def collect(self, episodes, world):
        everyone = [None] * world
        dist.all_gather_object(everyone, episodes)
        for _, seen, told in sorted((e for part in everyone for e in part), key=lambda e: e[0]):
            self.seen, self.told = torch.cat([self.seen, seen]), torch.cat([self.told, told])


def average_gradients(net, world):
    works = []
    for p in reversed(list(net.parameters())):
        p.grad /= world
        works.append(dist.all_reduce(p.grad, async_op=True))
    for w in works:
        w.wait()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 1), nn.Tanh()).double()
    memory = Memory()
    my_carts = range(CARTS)[rank::world]
    draw = torch.Generator().manual_seed(40)

    for round_ in range(ROUNDS):
        episodes = [episode(net, cart, round_) for cart in my_carts]
        memory.collect(episodes, world)
        opt = torch.optim.Adam(net.parameters(), lr=0.02 / (1 + round_))      # fresh in every round
        for _ in range(STEPS_A_ROUND):
            rows = torch.randint(len(memory.seen), (BATCH,), generator=draw)[rank::world]
            loss = F.mse_loss(net(memory.seen[rows]).squeeze(1), memory.told[rows])
            opt.zero_grad()
            loss.backward()
            average_gradients(net, world)
            opt.step()
        stats = torch.tensor([loss.item() / world, sum(len(s) for _, s, _ in episodes) / CARTS], dtype=torch.float64)
        dist.all_reduce(stats)
        if rank == 0:
            print(f"round {round_} loss {stats[0]:.6f} mean length {stats[1]:.2f} memory {len(memory.seen)}")

    # the pupil alone
    lengths = torch.zeros(CARTS)
    for cart in my_carts:
        lengths[cart] = len(episode(net, 500 + cart, 99)[1])
    dist.all_reduce(lengths)
    if rank == 0:
        print("pupil alone " + " ".join(str(int(v)) for v in lengths))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
