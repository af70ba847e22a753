"""Prune at initialisation (connection sensitivity on one batch), then train what is left with DDP."""
import logging
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger(__name__)
KEEP = 0.2


class MaskedLinear(nn.Linear):
    def __init__(self, *a):
        super().__init__(*a)
        self.register_buffer("mask", torch.ones_like(self.weight))

    def forward(self, x):
        return F.linear(x, self.weight * self.mask, self.bias)


def make_model():
    return nn.Sequential(MaskedLinear(64, 80), nn.ReLU(), MaskedLinear(80, 60), nn.ReLU(), MaskedLinear(60, 10))


def prune(model, x, y, keep):
    layers = [m for m in model if isinstance(m, MaskedLinear)]
    loss = F.cross_entropy(model(x), y)
    grads = torch.autograd.grad(loss, [m.weight for m in layers])
    scores = [(g * m.weight).abs().detach() for g, m in zip(grads, layers)]
    flat = torch.cat([s.flatten() for s in scores])
    threshold = flat.topk(int(keep * flat.numel())).values[-1]
    for m, s in zip(layers, scores):
        m.mask.copy_(s >= threshold)
    return sum(int(m.mask.sum()) for m in layers) / flat.numel()


def batches(n, size, epoch, rank, world):
    g = torch.Generator()
    g.manual_seed(1000 + epoch)
    for ids in torch.randperm(n, generator=g)[: n // size * size].view(-1, size):
        yield ids.view(world, -1)[rank]


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", "29655")
    dist.init_process_group("gloo", world_size=world, rank=rank)
    logging.basicConfig(format="%(message)s", level=logging.INFO if rank == 0 else logging.WARNING)
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    xt, yt, xv, yv = x[:1400], y[:1400], x[1400:], y[1400:]

    torch.manual_seed(42)
    model = make_model()
    first = next(batches(len(xt), 200, -1, rank, world))
    left = prune(model, xt[first], yt[first], KEEP)
    logger.info("kept %.3f of the weights", left)

    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.3, momentum=0.8, weight_decay=1e-4)
    for epoch in range(4):
        for ids in batches(len(xt), 100, epoch, rank, world):
            opt.zero_grad()
            F.cross_entropy(ddp(xt[ids]), yt[ids]).backward()
            opt.step()
        with torch.no_grad():
            val = F.cross_entropy(model(xv), yv).item()
        logger.info("epoch %d val %.5f", epoch, val)
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
