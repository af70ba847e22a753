"""Digit images with a small convnet; every weight is updated as soon as its gradient exists."""
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

BATCH, EPOCHS = 50, 3


def setup():
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
        return dist.get_rank(), world
    return 0, 1


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.c1 = nn.Conv2d(1, 12, 3, padding=1)
        self.c2 = nn.Conv2d(12, 24, 3, padding=1)
        self.gn = nn.GroupNorm(4, 24)
        self.fc = nn.Linear(24 * 4, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.c1(x)), 2)
        x = F.max_pool2d(F.relu(self.gn(self.c2(x))), 2)
        return self.fc(x.flatten(1))


class FusedUpdates:
    """One Adam per weight, run from the hook that fires once the gradient is complete."""

    def __init__(self, model, world, lr, total_steps):
        self.world = world
        self.optimizers, self.schedulers = {}, {}
        for p in model.parameters():
            decay = 1e-2 if p.dim() > 1 else 0.0
            self.optimizers[p] = torch.optim.AdamW([p], lr=lr, weight_decay=decay)
            self.schedulers[p] = LambdaLR(self.optimizers[p], lambda s: max(0.05, 1 - s / total_steps))
            p.register_post_accumulate_grad_hook(self.update)

    def update(self, p):
        if self.world > 1:
            dist.all_reduce(p.grad)
        p.grad.clamp_(-0.05, 0.05)
        self.optimizers[p].step()
        self.schedulers[p].step()
        p.grad = None


def main():
    rank, world = setup()
    torch.set_default_dtype(torch.float64)
    bunch = load_digits()
    images = torch.tensor(bunch.images).unsqueeze(1) / 16
    labels = torch.tensor(bunch.target)
    train_x, train_y = images[:720], labels[:720]
    test_x, test_y = images[1400:], labels[1400:]

    torch.manual_seed(5)
    model = Conv()
    per_epoch = -(-len(train_x) // BATCH)
    FusedUpdates(model, world, lr=4e-3, total_steps=per_epoch * EPOCHS)

    shown = []
    for epoch in range(EPOCHS):
        gen = torch.Generator().manual_seed(300 + epoch)
        for rows in torch.randperm(len(train_x), generator=gen).split(BATCH):
            part = torch.tensor_split(rows, world)[rank]
            loss = F.cross_entropy(model(train_x[part]), train_y[part], reduction="sum") / len(rows)
            loss.backward()
            shown.append(loss.detach())

    curve = torch.stack(shown)
    good = (model(test_x[rank::world]).argmax(1) == test_y[rank::world]).sum()
    if world > 1:
        dist.all_reduce(curve)
        dist.all_reduce(good)
    if rank == 0:
        print(f"first loss {curve[0].item():.10f}  last loss {curve[-1].item():.10f}")
        print(f"accuracy {good.item() / len(test_y):.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
