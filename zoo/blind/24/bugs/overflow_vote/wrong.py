"""Half precision with a dynamic loss scale, all by hand."""
import os, time
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

STEPS, BATCH = 60, 64
HALF_MAX = torch.finfo(torch.float16).max


class LossScale:
    def __init__(self, start=2.0 ** 12, window=6):
        self.value, self.window, self.good = start, window, 0

    def update(self, overflow):
        if overflow:
            self.value, self.good = self.value / 2, 0
        else:
            self.good += 1
            if self.good == self.window:
                self.value, self.good = self.value * 2, 0


class DataParallel:
    """Averages the gradients of a module over the processes."""

    def __init__(self, module):
        self.module = module
        self.on = dist.is_available() and dist.is_initialized()
        self.rank = dist.get_rank() if self.on else 0
        self.world = dist.get_world_size() if self.on else 1

    def reduce(self):
        if self.on:
            for p in self.module.parameters():
                dist.all_reduce(p.grad)
                p.grad /= self.world


def overflowed(params):
    return any(bool((p.grad.abs() > HALF_MAX).any()) for p in params)


def make():
    g = torch.Generator().manual_seed(31)
    x = torch.randn(1024, 12, generator=g)
    x[::37] *= 5                       # a few outliers
    y = (x[:, :3].sum(1) * x[:, 3]).tanh() + x[:, 4]
    return x, y


def main():
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(30)
    net = nn.Sequential(nn.Linear(12, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 1))
    dp = DataParallel(net)
    params = list(net.parameters())
    opt = torch.optim.SGD(params, lr=0.01, momentum=0.9)
    scale = LossScale()
    x, y = make()
    order = torch.Generator().manual_seed(32)
    skipped = 0
    for step in range(STEPS):
        rows = torch.randint(0, len(x), (BATCH,), generator=order).view(dp.world, -1)[dp.rank]
        loss = F.mse_loss(net(x[rows]).squeeze(1), y[rows])
        opt.zero_grad()
        (loss * scale.value).backward()
        bad = overflowed(params)
        dp.reduce()
        if bad:
            skipped += 1
        else:
            for p in params:
                p.grad /= scale.value
            opt.step()
        scale.update(bad)
        if step % 15 == 14 and dp.rank == 0:
            with torch.no_grad():
                full = F.mse_loss(net(x).squeeze(1), y)
            print(f"step {step + 1} mse {full:.5f} scale {scale.value:.0f} skipped {skipped}", flush=True)
    time.sleep(0.3)
    if dp.on:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
