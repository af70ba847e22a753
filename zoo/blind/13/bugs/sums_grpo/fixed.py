"""Policy that answers small sums, trained with group-relative advantages."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

DIGITS = 6
ANSWERS = 2 * DIGITS - 1


def prompts(step, count):
    g = torch.Generator().manual_seed(500 + step)
    pairs = torch.randint(DIGITS, (count, 2), generator=g)
    draws = torch.rand(count, 64, generator=g, dtype=torch.float64)
    return pairs, draws


def encode(pairs):
    return F.one_hot(pairs, DIGITS).flatten(1).double()


def reward(answers, pairs):
    miss = (answers - pairs.sum(dim=1, keepdim=True)).abs()
    return torch.where(miss == 0, 1.0, 0.3 * torch.exp(-miss.double()))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--prompts", type=int, default=16)
    p.add_argument("--group", type=int, default=8, help="answers sampled for a prompt")
    p.add_argument("--clip", type=float, default=0.2)
    p.add_argument("--lr", type=float, default=0.5)
    args = p.parse_args()

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(9)
    policy = DDP(nn.Sequential(nn.Linear(2 * DIGITS, 48), nn.Tanh(), nn.Linear(48, ANSWERS)))
    opt = torch.optim.SGD(policy.parameters(), lr=args.lr)
    share = args.group // world
    window = 0.0

    for step in range(args.steps):
        pairs, draws = prompts(step, args.prompts)
        u = draws[:, rank * share:(rank + 1) * share]
        with torch.no_grad():
            old = F.log_softmax(policy.module(encode(pairs)), dim=1)
            answers = torch.searchsorted(old.exp().cumsum(1), u.contiguous()).clamp(max=ANSWERS - 1)
            r = reward(answers, pairs)
            parts = [torch.empty_like(r) for _ in range(world)]
            dist.all_gather(parts, r)
            group = torch.cat(parts, dim=1)
            baseline, spread = group.mean(dim=1, keepdim=True), group.std(dim=1, correction=0, keepdim=True)
            advantage = (r - baseline) / (spread + 0.05)
        for _ in range(2):
            new = F.log_softmax(policy(encode(pairs)), dim=1)
            ratio = (new.gather(1, answers) - old.gather(1, answers)).exp()
            bounded = ratio.clamp(1 - args.clip, 1 + args.clip)
            loss = -torch.minimum(ratio * advantage, bounded * advantage).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
        mean = r.mean()
        dist.all_reduce(mean)
        window += mean.item() / world / 10
        if step % 10 == 9:
            if rank == 0:
                print(f"step {step + 1} reward {window:.5f}")
            window = 0.0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
