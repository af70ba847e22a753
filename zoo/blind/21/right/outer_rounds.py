"""Four workers train alone for some steps, then an outer Nesterov step moves the shared model."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

WORKERS, ROUNDS, INNER, BATCH = 4, 5, 6, 24


class Sines(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 2))

    def forward(self, x):
        return self.net(x)


def field(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 6, generator=g)
    y = torch.stack([torch.sin(x[:, 0] + x[:, 1]), x[:, 2] * torch.cos(x[:, 3])], 1)
    return x, y + 0.05 * torch.randn(n, 2, generator=g)


class Worker:
    """Owns a shard of the data, a copy of the model and inner optimizer state that outlives the rounds."""

    def __init__(self, number, shared):
        self.x, self.y = field(240, seed=900 + number)
        self.model = copy.deepcopy(shared)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.01, eps=1e-6)
        self.gen = torch.Generator().manual_seed(number)

    def run(self, shared):
        self.model.load_state_dict(shared.state_dict())
        total = 0.0
        for _ in range(INNER):
            ids = torch.randint(0, len(self.x), (BATCH,), generator=self.gen)
            loss = F.mse_loss(self.model(self.x[ids]), self.y[ids])
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            total += loss.item() / INNER
        return total


def main():
    rank, world = 0, 1
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    shared = Sines()
    outer = torch.optim.SGD(shared.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    workers = [Worker(k, shared) for k in range(rank, WORKERS, world)]
    xv, yv = field(200, seed=77)

    for r in range(ROUNDS):
        inner = torch.tensor([sum(w.run(shared) for w in workers)])
        for i, p in enumerate(shared.parameters()):
            p.grad = torch.zeros_like(p)
            for w in workers:
                p.grad += p.detach() - list(w.model.parameters())[i].detach()
            if world > 1:
                dist.all_reduce(p.grad)
            p.grad /= WORKERS
        outer.step()
        if world > 1:
            dist.all_reduce(inner)
        if rank == 0:
            with torch.no_grad():
                error = F.mse_loss(shared(xv), yv)
            print(f"round {r} inner loss {inner.item() / WORKERS:.5f} validation {error:.5f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
