"""Tide gauge forecasting with a curriculum: easy windows first.

A sampler of our own deals out global batches of 48; after each epoch all windows are scored in shards
(padded like DistributedSampler does, padding removed) and the next epoch uses a larger easy part."""
import math, os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, Subset
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

BATCH = 48


class PacedSampler(Sampler):
    def __init__(self, n, rank, world):
        self.rank, self.world = rank, world
        self.ranking, self.part, self.epoch = torch.arange(n), 0.4, 0

    def pace(self, epoch, hardness, part):
        self.epoch, self.part = epoch, part
        self.ranking = hardness.argsort(stable=True)

    def _batches(self):
        easy = self.ranking[: int(len(self.ranking) * self.part)]
        g = torch.Generator().manual_seed(31 * self.epoch + 5)
        shuffled = easy[torch.randperm(len(easy), generator=g)]
        return [b for b in shuffled.split(BATCH) if len(b) == BATCH]

    def __iter__(self):
        share = BATCH // self.world
        for b in self._batches():
            yield from b[self.rank * share:(self.rank + 1) * share].tolist()

    def __len__(self):
        return len(self._batches()) * BATCH // self.world


def tides():
    t = torch.arange(0, 700, dtype=torch.float32)
    g = torch.Generator().manual_seed(44)
    level = 1.2 * torch.sin(2 * math.pi * t / 12.42) + 0.4 * torch.sin(2 * math.pi * t / 24 + 1)
    surge = (torch.rand(700, generator=g) < 0.01).float().cumsum(0).remainder(2) * 0.5
    level = level + surge + 0.05 * torch.randn(700, generator=g)
    w = level.unfold(0, 25, 1)
    return TensorDataset(w[:, :24], w[:, 24])


@torch.no_grad()
def hardness_of_all(net, data, rank, world):
    n = len(data)
    padded = list(range(n)) + list(range((-n) % world))       # wrap around to a multiple of world
    x, y = data[padded[rank::world]]
    mine = (net(x)[:, 0] - y).square()
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    return torch.stack(parts, 1).flatten()[:n]


def main():
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    say = print if rank == 0 else (lambda *a, **k: None)

    data = tides()
    torch.manual_seed(6)
    net = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 1))
    ddp = DistributedDataParallel(net)
    opt = torch.optim.NAdam(ddp.parameters(), lr=3e-3)
    # only rank 0 pays for the moving average
    ema = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9)) if rank == 0 else None
    sampler = PacedSampler(len(data), rank, world)
    loader = DataLoader(data, batch_size=BATCH // world, sampler=sampler)
    for epoch, part in enumerate([0.4, 0.6, 0.8, 1.0]):
        sampler.pace(epoch, hardness_of_all(net, data, rank, world), part)
        shown = torch.zeros(())
        for i, (x, y) in enumerate(loader):
            loss = nn.functional.huber_loss(ddp(x)[:, 0], y)
            opt.zero_grad()
            loss.backward()
            opt.step()
            if ema is not None:
                ema.update_parameters(net)
            shown += loss.detach()
            if rank == 0 and sys.stdout.isatty():
                print(f"\repoch {epoch} [{'#' * i:<14}]", end="")
        dist.all_reduce(shown)
        say(f"epoch {epoch}: easiest {part:.0%}, {i + 1} steps, huber {shown.item() / world / (i + 1):.6f}")
    if rank == 0:
        with torch.no_grad():
            x, y = data[:]
            say(f"mse plain {nn.functional.mse_loss(net(x)[:, 0], y).item():.6f} averaged {nn.functional.mse_loss(ema(x)[:, 0], y).item():.6f}", flush=True)
    time.sleep(0.3)
    dist.destroy_process_group()


main()
