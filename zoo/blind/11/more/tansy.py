# LARS with gradient centralisation and annealed gradient noise
import math
import os
import time
import torch
import torch.nn as nn
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from sklearn.datasets import load_digits

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30120")


class LARS(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9, weight_decay=1e-4, trust=0.02, eta=0.01, gamma=0.55, seed=0):
        super().__init__(params, dict(lr=lr, momentum=momentum, weight_decay=weight_decay, trust=trust, eta=eta, gamma=gamma))
        # One stream for all processes: noise is added after the reduction and has to be the same everywhere
        self.noise = torch.Generator().manual_seed(seed)
        self.t = 0

    @torch.no_grad()
    def step(self):
        self.t += 1
        for group in self.param_groups:
            sigma = math.sqrt(group["eta"] / (1 + self.t) ** group["gamma"])
            for p in group["params"]:
                g = p.grad
                if g.dim() > 1:  # gradient centralisation
                    g = g - g.mean(dim=tuple(range(1, g.dim())), keepdim=True)
                # relative to the size of the gradient
                g = g + sigma * g.norm() / math.sqrt(g.numel()) * torch.randn(g.shape, generator=self.noise)
                if p.dim() > 1:
                    g = g.add(p, alpha=group["weight_decay"])
                    wn, gn = p.norm(), g.norm()
                    g = g * torch.where((wn > 0) & (gn > 0), group["trust"] * wn / gn, torch.ones(()))
                buf = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buf.mul_(group["momentum"]).add_(g, alpha=group["lr"] if p.dim() > 1 else 0.05)
                p.sub_(buf)


def allreduce_grads(params, coalesce=True):
    """mmcv style: coalesced all-reduce of the averaged gradients"""
    grads = [p.grad.data for p in params if p.requires_grad and p.grad is not None]
    world = dist.get_world_size()
    if coalesce:
        flat = _flatten_dense_tensors(grads)
        flat.div_(world)
        dist.all_reduce(flat)
        for g, s in zip(grads, _unflatten_dense_tensors(flat, grads)):
            g.copy_(s)
    else:
        for g in grads:
            dist.all_reduce(g.div_(world))


class Hook:
    def before_run(self, runner): pass
    def after_iter(self, runner): pass
    def after_epoch(self, runner): pass


class OptimizerHook(Hook):
    def after_iter(self, runner):
        runner.optimizer.zero_grad()
        runner.loss.backward()
        allreduce_grads(list(runner.model.parameters()))
        runner.optimizer.step()


class PolyLrHook(Hook):
    def before_run(self, runner):
        self.base = runner.optimizer.param_groups[0]["lr"]

    def after_iter(self, runner):
        runner.iter += 1
        warm = min(1.0, runner.iter / 10)
        runner.optimizer.param_groups[0]["lr"] = self.base * warm * (1 - runner.iter / runner.max_iters) ** 2


class EvalHook(Hook):
    @torch.no_grad()
    def after_epoch(self, runner):
        if runner.rank == 0:
            out = runner.model(runner.val[0])
            print(f"epoch {runner.epoch} val loss {nn.functional.cross_entropy(out, runner.val[1]):.5f} acc {(out.argmax(1) == runner.val[1]).float().mean():.4f}")


class Runner:
    def __init__(self, model, optimizer, batch, epochs):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.model, self.optimizer, self.batch, self.epochs = model, optimizer, batch, epochs
        x, y = load_digits(return_X_y=True)
        x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
        self.train, self.val = (x[:1440], y[:1440]), (x[1440:], y[1440:])
        self.iter, self.max_iters, self.hooks = 0, epochs * (1440 // batch), []

    def run(self):
        for h in self.hooks: h.before_run(self)
        for self.epoch in range(self.epochs):
            order = torch.randperm(1440, generator=torch.Generator().manual_seed(self.epoch + 77))
            for ids in order.split(self.batch):
                ids = ids.view(self.world, -1)[self.rank]
                self.loss = nn.functional.cross_entropy(self.model(self.train[0][ids]), self.train[1][ids])
                for h in self.hooks: h.after_iter(self)
            for h in self.hooks: h.after_epoch(self)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 24, 3), nn.ReLU(), nn.Flatten(), nn.Linear(384, 10))
    runner = Runner(model, LARS(model.parameters(), lr=1.0), batch=72, epochs=4)
    runner.hooks = [OptimizerHook(), PolyLrHook(), EvalHook()]
    runner.run()
    time.sleep(0.3)
    dist.destroy_process_group()
