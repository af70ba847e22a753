"""Normalising flow (RealNVP with ActNorm) on two moons.

Gradients are summed over the processes as soon as they are ready, by hooks, while the rest of the backward
pass goes on; the optimizer waits for them.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import make_moons

BATCH, STEPS = 120, 60
world = int(os.environ.get("WORLD_SIZE", 1))
rank = int(os.environ.get("RANK", 0))


class ActNorm(nn.Module):
    """Scale and shift, set from the first batch so that its outputs are standardised."""

    def __init__(self, dim):
        super().__init__()
        self.log_scale, self.shift = nn.Parameter(torch.zeros(dim)), nn.Parameter(torch.zeros(dim))
        self.ready = False

    @torch.no_grad()
    def prepare(self, x):
        moments = torch.cat([x.sum(0), x.square().sum(0), torch.tensor([float(len(x))])])
        if world > 1:
            dist.all_reduce(moments)
        mean, square = (moments[:-1] / moments[-1]).chunk(2)
        std = (square - mean.square()).clamp_min(1e-8).sqrt()
        self.log_scale.copy_(-std.log())
        self.shift.copy_(-mean / std)
        self.ready = True

    def forward(self, x):
        if not self.ready:
            self.prepare(x)
        return x * self.log_scale.exp() + self.shift, self.log_scale.sum().expand(len(x))

    def inverse(self, z):
        return (z - self.shift) * (-self.log_scale).exp()


class Coupling(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first = first
        self.net = nn.Sequential(nn.Linear(1, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 2))

    def split(self, x):
        a, b = x[:, :1], x[:, 1:]
        return (a, b) if self.first else (b, a)

    def join(self, a, b):
        return torch.cat((a, b) if self.first else (b, a), 1)

    def forward(self, x):
        a, b = self.split(x)
        s, t = self.net(a).chunk(2, 1)
        s = torch.tanh(s)
        return self.join(a, b * s.exp() + t), s.squeeze(1)

    def inverse(self, z):
        a, b = self.split(z)
        s, t = self.net(a).chunk(2, 1)
        return self.join(a, (b - t) * (-torch.tanh(s)).exp())


class Flow(nn.Module):
    def __init__(self, depth=4):
        super().__init__()
        layers = []
        for i in range(depth):
            layers += [ActNorm(2), Coupling(i % 2 == 0)]
        self.layers = nn.ModuleList(layers)

    def log_prob(self, x):
        log_det = 0.0
        for layer in self.layers:
            x, part = layer(x)
            log_det = log_det + part
        return log_det - 0.5 * (x.square() + torch.log(torch.tensor(2 * torch.pi))).sum(1)

    def sample(self, n, generator):
        z = torch.randn(n, 2, generator=generator)
        for layer in reversed(self.layers):
            z = layer.inverse(z)
        return z


class EagerSum:
    """Starts the all-reduce of a gradient when it has been accumulated."""

    def __init__(self, params, opt):
        self.works = []
        if world > 1:
            for p in params:
                p.register_post_accumulate_grad_hook(self.start)
            opt.register_step_pre_hook(self.finish)

    def start(self, p):
        self.works.append(dist.all_reduce(p.grad, async_op=True))

    def finish(self, *_):
        for work in self.works:
            work.wait()
        self.works.clear()


def main():
    torch.set_default_dtype(torch.float64)
    if world > 1:
        dist.init_process_group("gloo")
    points, _ = make_moons(1500, noise=0.06, random_state=4)
    points = torch.tensor(points)
    train, test = points[:1200], points[1200:]

    torch.manual_seed(91)
    flow = Flow()
    opt = torch.optim.Adamax(flow.parameters(), lr=1e-2)
    EagerSum(list(flow.parameters()), opt)
    order = torch.Generator().manual_seed(92)
    step = 0
    while step < STEPS:
        for rows in torch.randperm(len(train), generator=order).split(BATCH):
            loss = -flow.log_prob(train[rows[rank::world]]).sum() / BATCH
            opt.zero_grad()
            loss.backward()
            opt.step()
            step += 1
        with torch.no_grad():
            nll = -flow.log_prob(test[rank::world]).sum()
        if world > 1:
            dist.all_reduce(nll)
        if rank == 0 and step % 20 == 0:
            print(f"step {step} test nll {nll / len(test):.6f}")
    if rank == 0:
        with torch.no_grad():
            fake = flow.sample(500, torch.Generator().manual_seed(93))
        print("sample mean", [round(v, 5) for v in fake.mean(0).tolist()])
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
