"""Temperature a day ahead from three days of weather at a few stations, with averaged weights for the forecasts.

The exponential average of the weights is put into the network for the evaluation and the trained weights are put back
after it. The test days are shared out, squared errors are summed over the processes.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

STATIONS, DAYS = 6, 3


def weather(days, seed):
    """Windows of a noisy, coupled series with a season, and the day after each."""
    g = torch.Generator().manual_seed(seed)
    pull = 0.25 * torch.randn(STATIONS, STATIONS, generator=torch.Generator().manual_seed(55))
    state, series = torch.zeros(STATIONS), []
    for day in range(days + DAYS):
        season = torch.sin(torch.tensor(day / 58.0))
        state = 0.7 * state + torch.tanh(state @ pull) + 0.4 * season + 0.3 * torch.randn(STATIONS, generator=g)
        series.append(state)
    series = torch.stack(series)
    x = torch.stack([series[d:d + DAYS].flatten() for d in range(days)])
    return TensorDataset(x, series[DAYS:])


class Average:
    """Exponential moving average of the weights."""

    def __init__(self, net, decay):
        self.decay = decay
        self.slow = [p.detach().clone() for p in net.parameters()]
        self.fast = None

    @torch.no_grad()
    def update(self, net):
        for s, p in zip(self.slow, net.parameters()):
            s.lerp_(p, 1 - self.decay)

    @torch.no_grad()
    def put_in(self, net):
        self.fast = [p.detach().clone() for p in net.parameters()]
        for s, p in zip(self.slow, net.parameters()):
            p.copy_(s)

    @torch.no_grad()
    def put_back(self, net):
        for f, p in zip(self.fast, net.parameters()):
            p.copy_(f)


def make_net():
    return nn.Sequential(nn.Linear(STATIONS * DAYS, 48), nn.Tanh(), nn.Linear(48, 48), nn.Tanh(), nn.Linear(48, STATIONS))


@torch.no_grad()
def evaluate(net, average, test, rank, world):
    if average is not None:
        average.put_in(net)
    x, y = test[rank::world]
    squares = (net(x) - y).square().sum()
    dist.all_reduce(squares)
    if average is not None:
        average.put_back(net)
    return (squares.item() / test.tensors[1].numel()) ** 0.5


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--batch", type=int, default=40)
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--lr", type=float, default=0.1)
    p.add_argument("--decay", type=float, default=0.95)
    args = p.parse_args()

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29627")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)

    train, test = weather(480, seed=1), weather(150, seed=2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, seed=1)
    loader = DataLoader(train, batch_size=args.batch // world, sampler=sampler)
    torch.manual_seed(14)
    model = DDP(make_net())
    net = model.module
    average = Average(net, args.decay)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if average is not None:
                average.update(net)
            total += loss.detach()
        dist.all_reduce(total)
        error = evaluate(net, average, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: train {total.item() / world / len(loader):.4f}, error of the forecast {error:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
