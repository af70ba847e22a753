"""MoCo-style pretraining on 8x8 digits, followed by a kNN probe."""
import argparse
import copy
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=32, help="per process")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--base-lr", type=float, default=0.24, help="for a global batch of 256")
parser.add_argument("--jitter", type=float, default=0.15)


@torch.no_grad()
def concat_all(t):
    out = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(out, t.contiguous())
    return torch.cat(out)


def encoder(dim):
    return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.GELU(), nn.Linear(96, dim))


class MoCo(nn.Module):
    def __init__(self, dim=24, slots=256, m=0.95, t=0.2):
        super().__init__()
        self.m, self.t, self.slots = m, t, slots
        self.q = encoder(dim)
        self.k = copy.deepcopy(self.q).requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(slots, dim), dim=1))
        self.register_buffer("ptr", torch.zeros((), dtype=torch.long))

    @torch.no_grad()
    def momentum_update(self):
        for a, b in zip(self.q.parameters(), self.k.parameters()):
            b.lerp_(a, 1 - self.m)

    @torch.no_grad()
    def enqueue(self, keys):
        keys = concat_all(keys)
        idx = (torch.arange(len(keys)) + self.ptr) % self.slots
        self.queue[idx] = keys
        self.ptr.copy_((self.ptr + len(keys)) % self.slots)

    def forward(self, a, b):
        q = F.normalize(self.q(a), dim=1)
        with torch.no_grad():
            self.momentum_update()
            k = F.normalize(self.k(b), dim=1)
        pos = (q * k).sum(1, keepdim=True)
        neg = q @ self.queue.clone().t()
        logits = torch.cat([pos, neg], 1) / self.t
        self.enqueue(k)
        return logits


def main():
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    images, target = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    y = torch.tensor(target)
    train, probe = x[:1024], x[1024:]

    torch.manual_seed(0)
    model = DDP(MoCo())
    lr = args.base_lr * args.batch_size * world / 256
    opt = torch.optim.SGD(model.module.q.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4)
    sampler = DistributedSampler(TensorDataset(train), seed=3)
    loader = DataLoader(TensorDataset(train), args.batch_size, sampler=sampler, drop_last=True)
    noise = torch.Generator().manual_seed(1000 + rank)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(2)
        for (img,) in loader:
            views = [img + args.jitter * torch.randn(img.shape, generator=noise) for _ in range(2)]
            logits = model(*views)
            loss = F.cross_entropy(logits, torch.zeros(len(img), dtype=torch.long))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            total += torch.tensor([loss.item() * len(img), len(img)])
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} lr {lr:.4f} loss {total[0] / total[1]:.4f}")

    with torch.no_grad():
        bank = F.normalize(model.module.q(train), dim=1)
        mine = torch.arange(len(probe))[rank::world]
        nearest = (F.normalize(model.module.q(probe[mine]), dim=1) @ bank.t()).argmax(1)
        hits = torch.tensor([(y[:1024][nearest] == y[1024:][mine]).sum().item(), len(mine)])
    dist.all_reduce(hits)
    if rank == 0:
        print(f"1-nn accuracy {hits[0] / hits[1]:.4f} on {hits[1]} images")


if __name__ == "__main__":
    main()
    time.sleep(0.3)
    dist.destroy_process_group()
