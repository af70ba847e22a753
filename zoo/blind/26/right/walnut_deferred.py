"""Sine-wave phase regression. A layer's gradients travel while the next batch is prepared; the layer takes its step only
when the next forward is about to use it."""
import math
import os
import time

import torch
import torch.distributed as dist
from torch import nn


class LateSteps:
    """One small optimizer for each layer; the sum of gradients starts in backward and is awaited in front of forward."""

    def __init__(self, net, make, world):
        self.world = world
        self.waiting = {}
        self.opts = {}
        for layer in net.modules():
            own = list(layer.parameters(recurse=False))
            if not own:
                continue
            self.opts[layer] = make(own)
            self.waiting[layer] = []
            layer.register_forward_pre_hook(lambda m, _: self.settle(m))
            for p in own:
                p.register_post_accumulate_grad_hook(lambda p, m=layer: self.launch(m, p))

    def launch(self, layer, p):
        work = dist.all_reduce(p.grad, async_op=True) if self.world > 1 else None
        self.waiting[layer].append((p, work))

    def settle(self, layer):
        if not self.waiting[layer]:
            return
        for p, work in self.waiting[layer]:
            if work is not None:
                work.wait()
                p.grad.div_(self.world)
        self.waiting[layer].clear()
        self.opts[layer].step()
        self.opts[layer].zero_grad()

    def settle_all(self):
        for layer in self.opts:
            self.settle(layer)

    def set_lr(self, lr):
        for o in self.opts.values():
            for g in o.param_groups:
                g["lr"] = lr


def waves(numbers):
    xs, ys = [], []
    for n in numbers:
        g = torch.Generator().manual_seed(n)
        phase, rate = torch.rand(1, generator=g) * 2 * math.pi, 1 + torch.rand(1, generator=g)
        xs.append(torch.sin(torch.arange(24) * 0.26 * rate + phase) + 0.1 * torch.randn(24, generator=g))
        ys.append(torch.cat([phase.sin(), phase.cos()]))
    return torch.stack(xs), torch.stack(ys)


def main():
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    else:
        rank, world = 0, 1
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(24, 48), nn.SiLU(), nn.LayerNorm(48), nn.Linear(48, 32), nn.SiLU(), nn.Linear(32, 2))
    late = LateSteps(net, lambda ps: torch.optim.NAdam(ps, lr=4e-3, eps=1e-6), world)
    batch, steps = 40, 36
    for step in range(steps):
        numbers = list(range(step * batch, (step + 1) * batch))
        x, y = waves(numbers[rank::world])
        loss = (net(x) - y).square().mean()  # the layers' pending steps happen in here
        late.set_lr(4e-3 * (1 - step / steps))
        loss.backward()
        if step % 9 == 8:
            shown = loss.detach() / world
            if world > 1:
                dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step + 1:2d} loss {shown.item():.6f}", flush=True)
    late.settle_all()
    x, y = waves(range(90000 + rank, 90200, world))
    with torch.no_grad():
        err = (net(x) - y).square().sum()
    if world > 1:
        dist.all_reduce(err)
    if rank == 0:
        print(f"test mse {err.item() / 400:.6f}")
    if world > 1:
        time.sleep(0.3)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
