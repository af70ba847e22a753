"""bf16 network with float32 main gradients and master weights (as in Megatron-LM).

The network itself is bf16. As soon as the gradient of a weight is there, a hook adds it
to the float32 `main_grad` and frees it. After the micro-batches (eight a step, dealt
out to the processes) main gradients are all-reduced; AdamW works on the float32
masters, which are then copied into the network. The task: digits as 16 patches (mixer).
"""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn

MICRO, PER_STEP, STEPS = 12, 8, 40


class Mix(nn.Module):
    def __init__(self, patches, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(patches, 24), nn.GELU(), nn.Linear(24, patches, bias=False))
        self.within = nn.Sequential(nn.Linear(width, 48), nn.GELU(), nn.Linear(48, width))

    def forward(self, x):
        x = x + self.across(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.within(self.norm2(x))


class Mixer(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.embed, self.mix = nn.Linear(4, width), nn.Sequential(Mix(16, width), Mix(16, width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x):
        patches = x.view(-1, 4, 2, 4, 2).transpose(2, 3).reshape(-1, 16, 4)
        return self.head(self.norm(self.mix(self.embed(patches))).mean(1))


class MixedPrecision:
    """bf16 parameters of `net`, float32 masters in `optimizer`, main gradients in one flat buffer."""

    def __init__(self, net, world, **adam):
        self.world = world
        self.params = list(net.parameters())
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.params]
        if world > 1:
            for m in self.masters:
                dist.broadcast(m.detach(), src=0)
        net.bfloat16()
        self.flat = torch.zeros(sum(m.numel() for m in self.masters))
        views = self.flat.split([m.numel() for m in self.masters])
        for p, m, view in zip(self.params, self.masters, views):
            m.grad = view.view_as(m)
            p.main_grad = m.grad
            p.register_post_accumulate_grad_hook(self.collect)
        self.optimizer = torch.optim.AdamW(self.masters, **adam)
        self.copy_back()

    @staticmethod
    def collect(p):
        p.main_grad.add_(p.grad)
        p.grad = None

    @torch.no_grad()
    def copy_back(self):
        for p, m in zip(self.params, self.masters):
            p.copy_(m)

    def step(self, micro_batches, limit):
        if self.world > 1:
            dist.all_reduce(self.flat)
        self.flat.div_(micro_batches)
        norm = self.flat.norm()
        self.flat.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        self.optimizer.step()
        self.flat.zero_()
        self.copy_back()
        return norm


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo", init_method="env://")
    torch.manual_seed(40 + rank)                    # the start is process 0's

    x, y = load_digits(return_X_y=True)
    rows = np.random.default_rng(0).permutation(len(x))
    x, y = torch.tensor(x[rows] / 8 - 1), torch.tensor(y[rows])
    x = x.to(torch.bfloat16)
    net = Mixer()
    mixed = MixedPrecision(net, world, lr=8e-3, betas=(0.9, 0.95), weight_decay=0.05)
    order = torch.Generator().manual_seed(1)

    for step in range(STEPS):
        batch = torch.randint(0, 1440, (PER_STEP, MICRO), generator=order)
        total = torch.zeros(1, dtype=torch.float64)
        for micro in batch[rank::world]:
            loss = F.cross_entropy(net(x[micro]).float(), y[micro])
            loss.backward()
            total += loss.item()
        norm = mixed.step(PER_STEP, 1.0)
        if step % 10 == 9:
            if world > 1:
                dist.all_reduce(total)
            if rank == 0:
                print(f"step {step + 1}: loss {total.item() / PER_STEP:.4f}, norm {norm.item():.4f}")

    if rank == 0:                                    # fixed pieces, so that bf16 rounds alike
        with torch.no_grad():
            hits = sum(int((net(a).argmax(1) == b).sum()) for a, b in zip(x[1440:].split(51), y[1440:].split(51)))
        print(f"test: {hits} of {len(x) - 1440} right")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
