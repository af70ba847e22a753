"""Fine-tune a deep net on drawn letters; each process keeps the AdamW moments of its own parameters."""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

SHAPES = {
    "I": [(0, 2), (1, 2), (2, 2), (3, 2), (4, 2)],
    "L": [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (4, 1), (4, 2), (4, 3)],
    "T": [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (1, 2), (2, 2), (3, 2), (4, 2)],
    "X": [(0, 0), (1, 1), (2, 2), (3, 3), (4, 4), (0, 4), (1, 3), (3, 1), (4, 0)],
    "V": [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (3, 3), (2, 3), (1, 4), (0, 4)],
}


def letters(count, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(len(SHAPES), (count,), generator=g)
    x = 0.6 * torch.randn(count, 8, 8, generator=g)
    at = torch.randint(4, (count, 2), generator=g)
    for i, cells in enumerate(list(SHAPES.values())[k] for k in y.tolist()):
        for r, c in cells:
            x[i, r + at[i, 0], c + at[i, 1]] += 1.5
    return x.flatten(1), y


class OwnedAdamW:
    """Every process updates its own parameters and hands them out afterwards."""

    def __init__(self, model, lr, decay, weight_decay):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.params = list(model.parameters())
        own = list(enumerate(self.params))[self.rank::self.world]
        groups = [{"params": [p], "lr": lr * decay ** (len(self.params) - 1 - i)} for i, p in own]
        self.inner = torch.optim.AdamW(groups, weight_decay=weight_decay, eps=1e-5)

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def step(self):
        for p in self.params:
            dist.all_reduce(p.grad)
            p.grad /= self.world
        self.inner.step()
        for i, p in enumerate(self.params):
            dist.broadcast(p.data, src=i % self.world)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=6)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--decay", type=float, default=0.75, help="factor of the learning rate, towards the input")
    ap.add_argument("--weight-decay", type=float, default=0.05)
    args = ap.parse_args()

    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(14)
    x, y = letters(512, seed=3)
    model = nn.Sequential(
        nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(),
        nn.Linear(64, 64), nn.GELU(), nn.Linear(64, len(SHAPES)),
    )
    opt = OwnedAdamW(model, args.lr, args.decay, args.weight_decay)

    for epoch in range(args.epochs):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(40 + epoch))
        total = torch.zeros(())
        for rows in order.split(args.batch):
            rows = rows[rank::world]
            loss = F.cross_entropy(model(x[rows]), y[rows])
            opt.zero_grad()
            loss.backward()
            opt.step()
            total += loss.detach() * len(rows)
        dist.all_reduce(total)
        if rank == 0:
            print(f"epoch {epoch} loss {total.item() / len(x):.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
