"""Small CNN on digits with DDP.

Batch normalisation is per process on purpose: each process normalises with its own 16 images, as in the
original large-batch recipes (statistics over 16 images whatever the number of processes). The running
statistics are averaged over the processes before every evaluation.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

PER_PROCESS = 16
STEPS = 24


def average_buffers(model):
    for name, b in model.named_buffers():
        if b.is_floating_point():
            dist.all_reduce(b)
            b /= dist.get_world_size()


def main():
    for k, v in dict(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29708").items():
        os.environ.setdefault(k, v)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(d.target)
    train = TensorDataset(x[:1536], y[:1536])
    sampler = DistributedSampler(train, seed=0)
    loader = DataLoader(train, PER_PROCESS, sampler=sampler, drop_last=True)

    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10),
    )
    model = DDP(net, broadcast_buffers=False)
    opt = torch.optim.SGD(net.parameters(), lr=0.08, momentum=0.9)
    step, epoch = 0, 0
    while step < STEPS:
        sampler.set_epoch(epoch)
        for bx, by in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(bx), by).backward()
            opt.step()
            step += 1
            if step % 12 == 0:
                average_buffers(net)
                net.eval()
                with torch.no_grad():
                    out = net(x[1536:])
                    acc = (out.argmax(1) == y[1536:]).float().mean()
                net.train()
                if rank == 0:
                    print(f"step {step} val loss {nn.functional.cross_entropy(out, y[1536:]).item():.5f} acc {acc:.4f}")
            if step == STEPS:
                break
        epoch += 1
    if rank == 0:
        torch.save(net.state_dict(), "cnn.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
