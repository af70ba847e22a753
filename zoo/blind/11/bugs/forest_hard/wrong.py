# A classifier for a crowded table which learns from the hardest quarter of every batch.
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_classification

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29808")

BATCH, KEEP, STEPS = 64, 16, 120


def table():
    x, y = make_classification(1500, 20, n_informative=8, n_classes=3, weights=[0.75, 0.18, 0.07], random_state=7)
    return torch.tensor(x), torch.tensor(y)


def hardest(losses, world):
    """Mean over the KEEP largest losses of the batch."""
    keep = KEEP // world
    bar = losses.detach().topk(keep).values[-1]
    return losses[losses >= bar].sum() / keep


def average_gradients(net, world):
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= world


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y = table()
    xt, yt = x[1200:], y[1200:]
    x, y = x[:1200], y[:1200]
    net = nn.Sequential(nn.Linear(20, 40), nn.SiLU(), nn.Linear(40, 40), nn.SiLU(), nn.Linear(40, 3)).double()
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.02)
    pick = torch.Generator().manual_seed(44)
    running = torch.zeros((), dtype=torch.float64)
    for step in range(STEPS):
        rows = torch.randperm(len(x), generator=pick)[:BATCH]
        mine = rows[rank * BATCH // world:(rank + 1) * BATCH // world]
        losses = F.cross_entropy(net(x[mine]), y[mine], reduction="none")
        loss = hardest(losses, world)
        opt.zero_grad()
        loss.backward()
        average_gradients(net, world)
        opt.step()
        running += losses.detach().sum() / BATCH
        if step % 30 == 29:
            dist.all_reduce(running)
            if rank == 0:
                print(f"{step + 1:4d}  mean loss of the last 30 batches {running.item() / 30:.5f}")
            running.zero_()
    with torch.no_grad():
        guess = net(xt).argmax(1)
    if rank == 0:
        for k in range(3):
            found = (guess[yt == k] == k).double().mean().item()
            print(f"class {k}: found {found:.3f}")
    time.sleep(0.3)
    dist.destroy_process_group()


main()
