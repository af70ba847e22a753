"""Regression on the Friedman problem; every parameter tensor is optimised by one owning rank (ZeRO style)."""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import make_friedman1

EPOCHS, GLOBAL_BATCH = 4, 80
MAX_NORM = 2.0


class OwnedParameters:
    """Assigns parameters to ranks, largest first, each to the rank with the least so far."""

    def __init__(self, params, rank, world):
        self.params, self.rank, self.world = list(params), rank, world
        load = [0] * world
        self.owner = {}
        for p in sorted(self.params, key=lambda p: -p.numel()):
            target = load.index(min(load))
            self.owner[p] = target
            load[target] += p.numel()

    @property
    def mine(self):
        return [p for p in self.params if self.owner[p] == self.rank]

    def reduce_gradients(self):
        for p in self.params:
            if self.world > 1:
                dist.reduce(p.grad, dst=self.owner[p])
            if self.owner[p] == self.rank:
                p.grad /= self.world
            else:
                p.grad = None

    def clip(self, max_norm):
        square = torch.zeros(())
        for p in self.mine:
            square += p.grad.pow(2).sum()
        norm = square.sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for p in self.mine:
            p.grad.mul_(scale)
        return norm

    def publish(self):
        if self.world > 1:
            for p in self.params:
                dist.broadcast(p.data, src=self.owner[p])


class Net(nn.Module):
    def __init__(self, n_in):
        super().__init__()
        self.stem = nn.Linear(n_in, 40)
        self.mid = nn.Linear(40, 40)
        self.skip = nn.Linear(n_in, 40, bias=False)
        self.out = nn.Linear(40, 1)

    def forward(self, x):
        h = F.silu(self.mid(F.silu(self.stem(x))) + self.skip(x))
        return self.out(h).squeeze(-1)


def load():
    x, y = make_friedman1(n_samples=1000, n_features=10, noise=0.5, random_state=1)
    return torch.tensor(x), torch.tensor(y)


def main():
    torch.set_default_dtype(torch.float64)
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")

    x, y = load()
    x_train, y_train, x_test, y_test = x[:800], y[:800], x[800:], y[800:]
    torch.manual_seed(0)
    model = Net(10)
    owned = OwnedParameters(model.parameters(), rank, world)
    optimizer = torch.optim.SGD(owned.mine, lr=0.02, momentum=0.9, nesterov=True, weight_decay=1e-4)

    for epoch in range(EPOCHS):
        order = torch.randperm(800, generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(GLOBAL_BATCH):
            mine = batch[rank::world]
            loss = F.mse_loss(model(x_train[mine]), y_train[mine])
            model.zero_grad()
            loss.backward()
            owned.reduce_gradients()
            owned.clip(MAX_NORM)
            optimizer.step()
            owned.publish()

        with torch.no_grad():
            error = F.mse_loss(model(x_test[rank::world]), y_test[rank::world], reduction="sum")
        if world > 1:
            dist.all_reduce(error)
        if rank == 0:
            print(f"epoch {epoch} test mse {error.item() / len(y_test):.10f}")

    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
