"""Digits with ghost batch normalisation: statistics over fixed groups of eight images.

The groups are cut from the global batch, so they do not depend on the number of processes.
"""
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

BATCH, GROUP, EPOCHS = 64, 8, 2


class GhostNorm(nn.Module):
    def __init__(self, channels, momentum=0.1, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running", torch.stack([torch.zeros(channels), torch.ones(channels)]))
        self.momentum, self.eps = momentum, eps

    def forward(self, x):
        n, c, h, w = x.shape
        if not self.training:
            mean, var = self.running
            x = (x - mean.view(1, c, 1, 1)) * (var + self.eps).rsqrt().view(1, c, 1, 1)
            return x * self.weight.view(1, c, 1, 1) + self.bias.view(1, c, 1, 1)
        groups = x.view(n // GROUP, GROUP, c, h, w)
        var, mean = torch.var_mean(groups, dim=(1, 3, 4), keepdim=True, unbiased=False)
        normed = ((groups - mean) * (var + self.eps).rsqrt()).view(n, c, h, w)
        with torch.no_grad():
            seen = torch.stack([mean.flatten(1).mean(0), var.flatten(1).mean(0)])
            if dist.is_initialized():
                dist.all_reduce(seen)
                seen /= dist.get_world_size()
            self.running.lerp_(seen, self.momentum)
        return normed * self.weight.view(1, c, 1, 1) + self.bias.view(1, c, 1, 1)


def network():
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False), GhostNorm(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1, bias=False), GhostNorm(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, 10))


@torch.no_grad()
def evaluate(net, x, y, rank, world):
    net.eval()
    totals = torch.zeros(3, dtype=torch.float64)
    for chunk in torch.arange(len(x)).tensor_split(world)[rank].split(50):
        logits = net(x[chunk])
        totals[0] += nn.functional.cross_entropy(logits, y[chunk], reduction="sum")
        totals[1] += (logits.argmax(1) == y[chunk]).sum()
        totals[2] += len(chunk)
    if world > 1:
        dist.all_reduce(totals)
    net.train()
    return (totals[:2] / totals[2]).tolist()


def main():
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    world = dist.get_world_size() if dist.is_initialized() else 1

    digits = load_digits()
    x = torch.tensor(digits.images).unsqueeze(1) / 16.0
    y = torch.tensor(digits.target)
    train_x, train_y, test_x, test_y = x[:1408], y[:1408], x[1408:], y[1408:]

    torch.manual_seed(12)
    net = network().double()
    model = net
    if dist.is_initialized():
        model = DistributedDataParallel(net, forward_sync_buffers=False)
    opt = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    share = BATCH // world
    for epoch in range(EPOCHS):
        order = torch.randperm(len(train_x), generator=torch.Generator().manual_seed(epoch))
        for batch in order.split(BATCH):
            rows = batch[rank * share:(rank + 1) * share]
            loss = nn.functional.cross_entropy(model(train_x[rows]), train_y[rows], label_smoothing=0.05)
            opt.zero_grad()
            loss.backward()
            opt.step()
        for group in opt.param_groups:
            group["lr"] *= 0.4
        test_loss, accuracy = evaluate(net, test_x, test_y, rank, world)
        if rank == 0:
            spread = net[1].running[1].mean()
            print(f"epoch {epoch}: test loss {test_loss:.10f} accuracy {accuracy:.4f} variance {spread:.10f}")

    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
