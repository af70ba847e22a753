import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.func import functional_call, vmap

POPULATION, SIGMA, GENERATIONS, HORIZON = 64, 0.08, 20, 40


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2), nn.Tanh())

    def forward(self, obs):
        return self.net(obs)


def unflatten(flat, template):
    out, offset = {}, 0
    for name, p in template.named_parameters():
        out[name] = flat[offset:offset + p.numel()].view_as(p)
        offset += p.numel()
    return out


def rollout(model, flat, start, goal):
    params = unflatten(flat, model)
    pos, vel, reward = start, torch.zeros_like(start), torch.zeros(())
    for _ in range(HORIZON):
        action = functional_call(model, params, (torch.cat([pos, vel, goal - pos], dim=-1),))
        push = torch.round(action * 4) / 4
        vel = 0.9 * vel + 0.1 * push
        pos = (pos + 0.2 * vel).clamp(-2, 2)
        reward = reward - ((pos - goal).norm(dim=-1) + 0.05 * push.abs().sum(-1)).mean()
    return reward / HORIZON


def episodes(generation, count=12):
    g = torch.Generator().manual_seed(7000 + generation)
    return torch.rand(count, 2, generator=g) * 2 - 1, torch.rand(count, 2, generator=g) * 2 - 1


def direction(generation, member, size):
    g = torch.Generator().manual_seed(generation * 100003 + member)
    return torch.randn(size, generator=g)


def centred_ranks(scores):
    order = torch.empty(len(scores), dtype=torch.get_default_dtype())
    order[scores.argsort()] = torch.arange(len(scores), dtype=order.dtype)
    return order / (len(scores) - 1) - 0.5


def search(model, optimizer, schedule, rank, world):
    size = sum(p.numel() for p in model.parameters())
    pairs = POPULATION // 2
    run = vmap(rollout, in_dims=(None, 0, None, None))
    for generation in range(GENERATIONS):
        centre = nn.utils.parameters_to_vector(model.parameters()).detach()
        start, goal = episodes(generation)
        mine = range(rank, pairs, world)
        noise = torch.stack([direction(generation, m, size) for m in mine])
        plus = run(model, centre + SIGMA * noise, start, goal)
        minus = run(model, centre - SIGMA * noise, start, goal)
        scores = torch.zeros(pairs, 2)
        scores[rank::world] = torch.stack([plus, minus], dim=1)
        if world > 1:
            dist.all_reduce(scores)
        utility = centred_ranks(scores.flatten()).view(pairs, 2)
        weight = utility[:, 0] - utility[:, 1]
        estimate = torch.zeros(size)
        for m in range(pairs):
            estimate += weight[m] * direction(generation, m, size)
        estimate /= 2 * pairs * SIGMA
        for p, g in zip(model.parameters(), unflatten(estimate, model).values()):
            p.grad = -g.clone()
        optimizer.step()
        schedule.step()
        if rank == 0 and generation % 5 == 4:
            now = rollout(model, nn.utils.parameters_to_vector(model.parameters()).detach(), *episodes(-1, 64))
            print(f"generation {generation} best {scores.max().item():.5f} mean {scores.mean().item():.5f} policy {now.item():.5f}")


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(rank + 1)
    model = Policy()
    if world > 1:
        for p in model.parameters():
            dist.broadcast(p.data, src=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.005)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    with torch.no_grad():
        search(model, optimizer, schedule, rank, world)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
