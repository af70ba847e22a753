"""Gradients travel while the backward pass is still running; hooks start the exchange, the step waits for it."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits

BATCH, STEPS = 60, 80


class Overlapped(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        self.world = dist.get_world_size()
        self.flying = []
        for p in module.parameters():
            dist.broadcast(p.data, 0)
            p.register_post_accumulate_grad_hook(self.send)

    def send(self, p):
        p.grad.mul_(1 / self.world)
        self.flying.append(dist.all_reduce(p.grad, async_op=True))

    def land(self):
        for work in self.flying:
            work.wait()
        self.flying.clear()

    def forward(self, *args):
        return self.module(*args)


class Step:
    """An optimizer that waits for the exchange, then takes a sign step with decay."""

    def __init__(self, model, lr, beta=0.9, decay=1e-3):
        self.model, self.lr, self.beta, self.decay = model, lr, beta, decay
        self.moment = {p: torch.zeros_like(p) for p in model.parameters()}

    @torch.no_grad()
    def __call__(self):
        self.model.land()
        for p, m in self.moment.items():
            m.mul_(self.beta).add_(p.grad, alpha=1 - self.beta)
            p.mul_(1 - self.lr * self.decay)
            p.sub_(m / (m.abs().mean() + 1e-8), alpha=self.lr)
            p.grad = None


def main():
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29814")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    torch.manual_seed(rank)
    model = Overlapped(nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)))
    step_fn = Step(model, lr=2e-3)
    g = torch.Generator().manual_seed(15)
    for step in range(1, STEPS + 1):
        rows = torch.randint(len(x), (BATCH,), generator=g).chunk(world)[rank]
        loss = F.cross_entropy(model(x[rows]), y[rows])
        loss.backward()
        step_fn()
        if step % 20 == 0:
            with torch.no_grad():
                whole = F.cross_entropy(model.module(x), y).item()
            if rank == 0:
                print(f"step {step}: loss {whole:.5f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
