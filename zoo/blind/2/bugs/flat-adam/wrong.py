"""Regression net trained with one flat parameter vector; every rank owns a slice of it and the Adam moments of that slice."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

torch.set_num_threads(1)
OUT = "out"


def make_data(n=960):
    g = torch.Generator().manual_seed(12)
    x = torch.rand(n, 6, generator=g) * 2 - 1
    y = torch.sin(3 * x[:, :1]) * x[:, 1:2] + x[:, 2:3] ** 2 - 0.5 * x[:, 3:4] * x[:, 4:5]
    return x, y


class FlatAdam:
    def __init__(self, model, lr=1e-2, betas=(0.9, 0.98), eps=1e-8):
        self.model, self.lr, self.betas, self.eps = model, lr, betas, eps
        self.world, self.rank = dist.get_world_size(), dist.get_rank()
        n = sum(p.numel() for p in model.parameters())
        self.chunk = math.ceil(n / self.world)
        self.n, self.t = n, 0
        self.m, self.v = torch.zeros(self.chunk), torch.zeros(self.chunk)

    def _padded(self, vec):
        return torch.cat([vec, vec.new_zeros(self.chunk * self.world - self.n)])

    @torch.no_grad()
    def step(self):
        grad = self._padded(torch.cat([p.grad.flatten() for p in self.model.parameters()]))
        dist.all_reduce(grad)
        g = grad.chunk(self.world)[self.rank] / self.world
        mine = self._padded(parameters_to_vector(self.model.parameters())).chunk(self.world)[self.rank].clone()
        self.t += 1
        b1, b2 = self.betas
        self.m.lerp_(g, 1 - b1)
        self.v.mul_(b2).addcmul_(g, g, value=1 - b2)
        denom = (self.v / (1 - b2 ** self.t)).sqrt_().add_(self.eps)
        mine.addcdiv_(self.m / (1 - b1 ** self.t), denom, value=-self.lr)
        parts = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(parts, mine)
        vector_to_parameters(torch.cat(parts)[:self.n], self.model.parameters())

    def state_dict(self):
        return {"m": self.m, "v": self.v, "t": self.t, "lr": self.lr}

    def load_state_dict(self, state):
        self.m.copy_(state["m"])
        self.v.copy_(state["v"])
        self.t, self.lr = state["t"], state["lr"]


def build():
    torch.manual_seed(40)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1))
    return model, FlatAdam(model)


def run(model, opt, x, y, first, last):
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(first, last):
        g = torch.Generator().manual_seed(100 + step)
        idx = torch.randperm(len(x), generator=g)[:64][rank::world]
        loss = nn.functional.smooth_l1_loss(model(x[idx]), y[idx])
        model.zero_grad()
        loss.backward()
        opt.step()
        if step % 5 == 4 and rank == 0:
            with torch.no_grad():
                print(f"step {step + 1}: mse {nn.functional.mse_loss(model(x), y).item():.5f}", flush=True)


def main():
    dist.init_process_group("gloo")
    x, y = make_data()
    model, opt = build()
    run(model, opt, x, y, 0, 25)
    path = os.path.join(OUT, "step25.pt")
    if dist.get_rank() == 0:
        os.makedirs(OUT, exist_ok=True)
        torch.save({"model": model.state_dict(), "optim": opt.state_dict(), "step": 25}, path)
    dist.barrier()

    model, opt = build()
    ckpt = torch.load(path)
    model.load_state_dict(ckpt["model"])
    opt.load_state_dict(ckpt["optim"])
    run(model, opt, x, y, ckpt["step"], 50)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
