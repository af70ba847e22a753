"""Regression on a noisy synthetic table; the rate is cut when the validation error stops falling."""
import argparse
import logging
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

log = logging.getLogger("plateau")


def table(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 15, generator=g)
    y = torch.sin(2 * x[:, 0]) * x[:, 1] + x[:, 2:6].clamp(min=0).sum(1)
    return TensorDataset(x, y + 0.8 * torch.randn(n, generator=g))


class Regressor(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(15, width), nn.ELU(), nn.Linear(width, width), nn.ELU())
        self.top = nn.Linear(width, 1)

    def forward(self, x):
        return self.top(self.layers(x))[:, 0]


@torch.no_grad()
def validation_error(model, data, rank, world):
    x, y = data.tensors
    x, y = x[rank::world], y[rank::world]
    error = ((model(x) - y) ** 2).mean()
    return error.item()


def fit(args):
    rank, world = dist.get_rank(), dist.get_world_size()
    train, valid = table(1200, 0), table(200, 1)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=args.seed)
    loader = DataLoader(train, batch_size=args.batch // world, sampler=sampler, drop_last=True)
    torch.manual_seed(args.seed)
    model = DistributedDataParallel(Regressor())
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    sched = ReduceLROnPlateau(opt, factor=0.5, patience=0, threshold=0.03)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            opt.step()
        error = validation_error(model.module, valid, rank, world)
        sched.step(error)
        log.info("epoch %d validation %.5f rate %.5f", epoch, error, opt.param_groups[0]["lr"])
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=15)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    logging.basicConfig(level=logging.INFO if dist.get_rank() == 0 else logging.WARNING, format="%(message)s")
    model = fit(args)
    time.sleep(0.3)
    dist.destroy_process_group()
