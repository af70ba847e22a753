"""Jet tagging with inputs that do not divide evenly: DDP and a meter under one Join context.

Files of events go to the processes in turn, files differ in length, so processes run out of batches
at different times. The meter is the example of the Join tutorial, grown a little.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel as DDP

EPOCHS = 3
ROUND = 24          # events of one round, over all processes
FEATURES = 10


class MeterHook(JoinHook):
    def __init__(self, meter):
        self.meter = meter

    def main_hook(self):
        self.meter.add(0.0, 0)


class Meter(Joinable):
    """Adds up loss and events over all processes, also over those that still have batches."""

    def __init__(self):
        super().__init__()
        self.sum = torch.zeros(2, dtype=torch.float64)

    def add(self, loss, count):
        if count:
            Join.notify_join_context(self)
        both = torch.tensor([loss, float(count)], dtype=torch.float64)
        dist.all_reduce(both)
        self.sum += both

    def join_hook(self, **kwargs):
        return MeterHook(self)

    @property
    def join_device(self):
        return torch.device("cpu")

    @property
    def join_process_group(self):
        return dist.group.WORLD


def events(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(2, (n,), generator=g)
    x = torch.randn(n, FEATURES, generator=g)
    x[:, :4] = x[:, :4] * (1 + 0.8 * y[:, None]) + 0.8 * y[:, None]
    return x, y.float()


def rounds(n, epoch):
    """Rounds of one epoch; the last one is shorter."""
    g = torch.Generator().manual_seed(1000 + epoch)
    return torch.randperm(n, generator=g).split(ROUND)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(FEATURES, 32), nn.ELU(), nn.Linear(32, 32), nn.ELU(), nn.Linear(32, 1))
    ddp = DDP(net)
    opt = torch.optim.SGD(ddp.parameters(), lr=0.3, weight_decay=1e-3)
    sched = torch.optim.lr_scheduler.ExponentialLR(opt, 0.7)
    x, y = events(ROUND * 15 + 5, seed=11)          # 5 events are left for the last round
    slot = ROUND // world

    for epoch in range(EPOCHS):
        meter = Meter()
        mine = []
        for rows in rounds(len(x), epoch):
            part = rows[rank * slot:(rank + 1) * slot]
            if len(part):
                mine.append((part, len(rows)))
        with Join([ddp, meter]):
            for part, size in mine:
                out = ddp(x[part]).squeeze(1)
                loss = F.binary_cross_entropy_with_logits(out, y[part], reduction="sum")
                opt.zero_grad()
                (loss * world / size).backward()
                opt.step()
                meter.add(loss.item(), len(part))
        total, count = [m.clone() for m in meter.sum]
        # processes that joined early have seen every sum, as the hook takes part in them
        if rank == 0:
            print(f"epoch {epoch} loss {total / count:.5f} events {int(count)} lr {sched.get_last_lr()[0]:.3f}")
        sched.step()

    vx, vy = events(333, seed=12)
    with torch.no_grad():
        right = ((net(vx[rank::world]).squeeze(1) > 0) == (vy[rank::world] > 0.5)).sum()
    dist.all_reduce(right)
    if rank == 0:
        print(f"tagged {right.item()} of {len(vx)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
