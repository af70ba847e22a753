"""Linear-probe style training in mixed precision with a flat, sharded master copy.

A frozen random convolution encodes digits under bf16 autocast; the head on top
is trained in float32.  The head's weights live in one flat float32 buffer, cut
evenly over the processes: each updates its slice, then the slices are gathered.
"""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

STEPS, BATCH, LR, MOMENTUM = 60, 32, 2e-3, 0.9


class Head(nn.Module):
    def __init__(self, n_in):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(n_in, 40), nn.Linear(40, 10)

    def forward(self, f):
        return self.fc2(F.gelu(self.fc1(f)))


@torch.no_grad()
def encode(images):
    torch.manual_seed(7)
    conv = nn.Sequential(nn.Conv2d(1, 12, 3), nn.ReLU(), nn.Conv2d(12, 16, 3, stride=2), nn.ReLU(), nn.Flatten())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        feats = [conv(chunk) for chunk in images.split(64)]
    feats = torch.cat(feats).float()
    return (feats - feats.mean(0)) / (feats.std(0) + 1e-3)


class ShardedMaster:
    def __init__(self, net, rank, world):
        self.params = list(net.parameters())
        size = sum(p.numel() for p in self.params)
        self.part = -(-size // world)
        self.flat = torch.zeros(self.part * world)
        self.grad = torch.zeros_like(self.flat)
        self.velocity = torch.zeros(self.part)
        self.rank, self.world = rank, world
        at = 0
        for p in self.params:
            view = self.flat[at:at + p.numel()].view_as(p)
            view.copy_(p.detach())
            p.data = view
            p.grad = self.grad[at:at + p.numel()].view_as(p)
            at += p.numel()

    def step(self):
        if self.world > 1:
            dist.all_reduce(self.grad)
            self.grad /= self.world
        mine = slice(self.rank * self.part, (self.rank + 1) * self.part)
        self.velocity.mul_(MOMENTUM).add_(self.grad[mine])
        self.flat[mine] -= LR * self.velocity
        if self.world > 1:
            wire = self.flat[mine].to(torch.bfloat16)
            parts = [torch.empty_like(wire) for _ in range(self.world)]
            dist.all_gather(parts, wire)
            self.flat.copy_(torch.cat(parts))
        self.grad.zero_()


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    digits = load_digits()
    feats = encode(torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 8 - 1)
    labels = torch.tensor(digits.target)
    torch.manual_seed(23)
    net = Head(feats.shape[1])
    master = ShardedMaster(net, rank, world)
    draw = torch.Generator().manual_seed(24)
    for step in range(STEPS):
        rows = torch.randperm(1400, generator=draw)[:BATCH][rank::world]
        loss = F.cross_entropy(net(feats[rows]), labels[rows])
        loss.backward()
        master.step()
        if step % 15 == 14:
            shown = loss.detach() / world
            if world > 1:
                dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1} loss {shown.item():.5f}")
    with torch.no_grad():
        out = net(feats[1400:])
        nll = F.cross_entropy(out, labels[1400:]).item()
        acc = (out.argmax(1) == labels[1400:]).float().mean().item()
    if rank == 0:
        print(f"test nll {nll:.5f} accuracy {acc:.4f}")
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
