"""Digits with an MLP. Each process sends its share through the net in two chunks to save memory."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29802")

BATCH = 96
EPOCHS = 5


def load():
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    y = torch.tensor(digits.target)
    return x[:1536], y[:1536], x[1536:], y[1536:]


def build():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(64, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 10))


def train_step(net, opt, x, y):
    opt.zero_grad(set_to_none=True)
    with net.no_sync():
        outs = [net(part) for part in x.chunk(2)]
    loss = F.cross_entropy(torch.cat(outs), y)
    loss.backward()
    opt.step()
    return loss.detach()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y, xt, yt = load()
    net = DistributedDataParallel(build())
    opt = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=2, gamma=0.5)
    for epoch in range(EPOCHS):
        gen = torch.Generator().manual_seed(100 + epoch)
        order = torch.randperm(len(x), generator=gen)
        total = torch.zeros(())
        for start in range(0, len(x), BATCH):
            rows = order[start:start + BATCH][rank::world]
            total += train_step(net, opt, x[rows], y[rows])
        sched.step()
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch}: loss {total.item() / world / (len(x) // BATCH):.5f} lr {sched.get_last_lr()[0]:.3f}")
    net.eval()
    with torch.no_grad():
        hits = (net.module(xt[rank::world]).argmax(1) == yt[rank::world]).sum()
    dist.all_reduce(hits)
    if rank == 0:
        print(f"test accuracy {hits.item() / len(xt):.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


main()
