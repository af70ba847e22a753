"""Quantisation-aware training on the bundled digits: four-bit activations with a running range."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP


class FakeQuant(nn.Module):
    """Rounds to `bits` bits; the range follows the largest magnitude seen in training."""

    def __init__(self, bits=4, keep=0.9):
        super().__init__()
        self.levels, self.keep = 2 ** (bits - 1) - 1, keep
        self.register_buffer("peak", torch.zeros(()))

    def observe(self, x):
        top = x.detach().abs().max()
        self.peak.copy_(top if self.peak == 0 else self.keep * self.peak + (1 - self.keep) * top)

    def forward(self, x):
        if self.training:
            self.observe(x)
        step = self.peak / self.levels
        y = x.clamp(-self.peak, self.peak)
        return y + ((y / step).round() * step - y).detach()


class Block(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.lin, self.quant = nn.Linear(inputs, outputs), FakeQuant()

    def forward(self, x):
        return self.quant(F.silu(self.lin(x)))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--batch", type=int, default=64)
    p.add_argument("--lr", type=float, default=0.1)
    args = p.parse_args()

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(40)
    digits = load_digits()
    x, y = torch.tensor(digits.data / 16.0), torch.tensor(digits.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, test = order[:1280], order[1280:]
    model = DDP(nn.Sequential(Block(64, 48), Block(48, 48), nn.Linear(48, 10)))
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        model.train()
        total = torch.zeros(())
        mixed = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(epoch + 1))]
        for rows in mixed.split(args.batch):
            rows = rows[rank::world]
            loss = F.cross_entropy(model(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach() * len(rows)
        model.eval()
        part = test[rank::world]
        with torch.no_grad():
            right = (model.module(x[part]).argmax(1) == y[part]).sum().double()
        sums = torch.stack([total, right])
        dist.all_reduce(sums)
        if rank == 0:
            print(f"epoch {epoch} loss {sums[0] / len(train):.5f} test accuracy {sums[1] / len(test):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
