"""Metric learning with triplets; Recall@1 on held out digits."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP


def triplets(y, n, gen):
    a = torch.randint(len(y), (n,), generator=gen)
    score = torch.rand(n, len(y), generator=gen)
    same = y[a].unsqueeze(1) == y.unsqueeze(0)
    p = (score * same).argmax(1)
    q = (score * ~same).argmax(1)
    return a, p, q


@torch.no_grad()
def recall_at_1(net, x, y, rank, world):
    mine = torch.arange(rank, len(x), world)
    emb = F.normalize(net(x[mine]), dim=1)
    lab = y[mine]
    sim = emb @ emb.T
    sim.fill_diagonal_(-2)
    hit = (lab[sim.argmax(1)] == lab).float()
    total = torch.stack([hit.sum(), torch.tensor(float(len(hit)))])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--margin", type=float, default=0.3)
    args = ap.parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29611")
    dist.init_process_group("gloo", rank=rank, world_size=world)

    d = load_digits()
    x = torch.tensor(d.data, dtype=torch.float32) / 16
    y = torch.tensor(d.target)
    x_train, y_train, x_test, y_test = x[:1200], y[:1200], x[1200:1400], y[1200:1400]

    torch.manual_seed(14)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 6))
    ddp = DDP(net)
    opt = torch.optim.Adam(ddp.parameters(), lr=2e-3, weight_decay=1e-5)
    gen = torch.Generator().manual_seed(1)
    for step in range(1, args.steps + 1):
        rows = torch.stack(triplets(y_train, args.batch, gen)).chunk(world, 1)[rank]
        e = F.normalize(ddp(x_train[rows.flatten()]), dim=1).view(3, -1, 6)
        gap = (e[0] - e[1]).square().sum(1) - (e[0] - e[2]).square().sum(1)
        loss = F.softplus((gap + args.margin) * 4).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0:
            r1 = recall_at_1(net, x_test, y_test, rank, world)
            if rank == 0:
                print(f"step {step} recall@1 {r1:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
