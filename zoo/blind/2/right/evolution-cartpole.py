"""OpenAI-style evolution strategy: processes evaluate their share of a population and exchange only the returns."""
import argparse
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters


def cartpole_returns(policy, starts, horizon=100):
    s = starts.clone()
    alive = torch.ones(len(s))
    total = torch.zeros(len(s))
    for _ in range(horizon):
        force = 10.0 * torch.tanh(policy(s).squeeze(1))
        x, v, th, w = s.unbind(1)
        tmp = (force + 0.05 * w * w * th.sin()) / 1.1
        acc_th = (9.8 * th.sin() - th.cos() * tmp) / (0.5 * (4 / 3 - 0.1 * th.cos() ** 2 / 1.1))
        acc_x = tmp - 0.05 * acc_th * th.cos() / 1.1
        s = torch.stack([x + 0.02 * v, v + 0.02 * acc_x, th + 0.02 * w, w + 0.02 * acc_th], 1)
        alive = alive * ((s[:, 2].abs() < 0.21) & (s[:, 0].abs() < 2.4)).float()
        total += alive
    return total.mean().item()


def noise(seed, n):
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def centred_ranks(r):
    ranks = torch.empty(len(r))
    ranks[r.argsort(stable=True)] = torch.arange(len(r), dtype=torch.float32)
    return ranks / (len(r) - 1) - 0.5


@torch.no_grad()
def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--pairs", type=int, default=10)
    ap.add_argument("--generations", type=int, default=15)
    ap.add_argument("--sigma", type=float, default=0.1)
    ap.add_argument("--lr", type=float, default=0.08)
    a = ap.parse_args()
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1))
    worker = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 1))
    opt = torch.optim.Adam(policy.parameters(), lr=a.lr)
    n = sum(p.numel() for p in policy.parameters())
    for gen in range(a.generations):
        theta = parameters_to_vector(policy.parameters())
        starts = 0.1 * torch.randn(8, 4, generator=torch.Generator().manual_seed(10_000 + gen))
        mine = []
        for i in range(rank, a.pairs, world):
            eps = noise(gen * a.pairs + i, n)
            for sign in (1, -1):
                vector_to_parameters(theta + sign * a.sigma * eps, worker.parameters())
                mine.append((i, sign, cartpole_returns(worker, starts)))
        table = [None] * world
        dist.all_gather_object(table, mine)
        rows = sorted(sum(table, []))
        score = centred_ranks(torch.tensor([r for _, _, r in rows]))
        grad = torch.zeros(n)
        for (i, sign, _), u in zip(rows, score):
            grad -= u * sign * noise(gen * a.pairs + i, n)
        grad /= len(rows) * a.sigma
        at = 0
        for p in policy.parameters():
            p.grad = grad[at:at + p.numel()].view_as(p).clone()
            at += p.numel()
        opt.step()
        if rank == 0 and gen % 5 == 4:
            test = 0.1 * torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
            print(f"generation {gen + 1} population mean {sum(r for *_, r in rows) / len(rows):.2f} "
                  f"policy return {cartpole_returns(policy, test):.2f}")
    if rank == 0:
        torch.save(policy.state_dict(), "/tmp/es_cartpole.pt")
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    main()
    time.sleep(0.3)
    dist.destroy_process_group()
