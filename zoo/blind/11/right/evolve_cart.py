"""Evolution strategies: no gradient is computed, every process tries some of the perturbations."""
import os
import time

import torch
import torch.distributed as dist

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29848")

PAIRS, SIGMA, HIDDEN = 8, 0.1, 8
SHAPES = [(2, HIDDEN), (HIDDEN,), (HIDDEN, 1)]
SIZE = sum(torch.Size(s).numel() for s in SHAPES)


def act(theta, state):
    w1, b1, w2 = (t.view(s) for t, s in zip(theta.split([torch.Size(s).numel() for s in SHAPES]), SHAPES))
    return torch.tanh(torch.tanh(state @ w1 + b1) @ w2).squeeze(1)


def reward(theta, seed):
    """A cart on a rail is to be brought to rest in the middle; mean over six starts."""
    g = torch.Generator().manual_seed(seed)
    state = torch.rand(6, 2, generator=g, dtype=torch.float64) * 2 - 1
    cost = torch.zeros((), dtype=torch.float64)
    for _ in range(12):
        force = act(theta, state)
        speed = state[:, 1] + 0.2 * force
        state = torch.stack([state[:, 0] + 0.2 * speed, speed], 1)
        cost += state.square().sum(1).mean()
    return -cost


def noise(step, k):
    g = torch.Generator().manual_seed(7919 * step + k)
    return torch.randn(SIZE, generator=g, dtype=torch.float64)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    theta = torch.nn.Parameter(0.1 * torch.randn(SIZE, dtype=torch.float64))
    opt = torch.optim.Adam([theta], lr=0.05)
    for step in range(50):
        rewards = torch.zeros(PAIRS, 2, dtype=torch.float64)
        with torch.no_grad():
            for k in range(rank, PAIRS, world):
                e = SIGMA * noise(step, k)
                rewards[k, 0] = reward(theta + e, step)
                rewards[k, 1] = reward(theta - e, step)
        dist.all_reduce(rewards)
        ranks = rewards.flatten().argsort().argsort().double().view(PAIRS, 2) / (2 * PAIRS - 1) - 0.5
        direction = torch.zeros(SIZE, dtype=torch.float64)
        for k in range(PAIRS):
            direction += (ranks[k, 0] - ranks[k, 1]) * noise(step, k)
        theta.grad = -direction / (PAIRS * SIGMA)
        opt.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: mean reward {rewards.mean().item():.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
