"""Segmenting discs in noisy images: bfloat16 autocast, gradient accumulation, and
gradients reduced during the backward pass by hooks."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
SIZE, GLOBAL_MICRO, ACCUMULATE, STEPS = 16, 16, 3, 24


def conv(inp, out):
    return nn.Sequential(nn.Conv2d(inp, out, 3, padding=1), nn.GroupNorm(2, out), nn.ReLU())


class SmallUNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = conv(1, 8), conv(8, 12)
        self.middle = conv(12, 12)
        self.up = conv(24, 8)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.middle(F.max_pool2d(b, 2))
        c = F.interpolate(c, scale_factor=2.0)
        d = F.interpolate(self.up(torch.cat([b, c], 1)), scale_factor=2.0)
        return self.out(torch.cat([a, d], 1))[:, 0]


class OverlappedReduction:
    """All-reduces a gradient as soon as it is complete."""

    def __init__(self, model):
        self.params = [p for p in model.parameters() if p.requires_grad]
        if WORLD > 1:
            for p in self.params:
                p.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, p):
        dist.all_reduce(p.grad)

    def finish(self):
        for p in self.params:
            p.grad.div_(WORLD)


def discs(n, gen):
    axis = torch.arange(SIZE, dtype=torch.float32)
    cx, cy = (4 + 8 * torch.rand(2, n, 1, 1, generator=gen))
    r = 2 + 3 * torch.rand(n, 1, 1, generator=gen)
    mask = ((axis[None, :, None] - cy) ** 2 + (axis[None, None] - cx) ** 2 < r ** 2).float()
    image = mask * 0.8 + 0.6 * torch.randn(n, SIZE, SIZE, generator=gen)
    return image[:, None], mask


def total(value):
    value = value.detach().clone()
    if WORLD > 1:
        dist.all_reduce(value)
    return value.item()


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(23)
    model = SmallUNet()
    reduction = OverlappedReduction(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    gen = torch.Generator().manual_seed(7)
    local = GLOBAL_MICRO // WORLD
    mine = slice(RANK * local, (RANK + 1) * local)

    for step in range(STEPS):
        shown = torch.zeros(())
        for micro in range(ACCUMULATE):
            images, masks = discs(GLOBAL_MICRO, gen)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(images[mine])
            loss = F.binary_cross_entropy_with_logits(logits.float(), masks[mine]) / ACCUMULATE
            loss.backward()
            shown += loss.detach()
        reduction.finish()
        optimizer.step()
        optimizer.zero_grad()
        mean = total(shown) / WORLD
        if RANK == 0 and step % 6 == 5:
            print(f"step {step + 1:2d} loss {mean:.8f}")

    images, masks = discs(64, torch.Generator().manual_seed(100))
    part = slice(RANK * 64 // WORLD, (RANK + 1) * 64 // WORLD)
    with torch.no_grad():
        found = (model(images[part]) > 0).float()
    overlap = total((found * masks[part]).sum())
    union = total(((found + masks[part]) > 0).float().sum())
    if RANK == 0:
        print(f"intersection over union {overlap / union:.6f}")
    if WORLD > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
