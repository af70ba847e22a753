"""Day-ahead load forecast from sliding windows; the step size follows the validation error."""
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP

PAST, AHEAD, BATCH, EPOCHS = 48, 12, 32, 30


def series(n=610):
    g = torch.Generator().manual_seed(90)
    t = torch.arange(n).to(torch.get_default_dtype())
    load = torch.sin(6.2832 * t / 24) + 0.5 * torch.sin(6.2832 * t / 168) + 0.001 * t
    return load + 0.15 * torch.randn(n, generator=g).cumsum(0) * 0.1 + 0.1 * torch.randn(n, generator=g)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.trend = nn.Linear(PAST, AHEAD)
        self.rest = nn.Sequential(nn.Linear(PAST, 48), nn.SiLU(), nn.Linear(48, AHEAD))

    def forward(self, x):
        level = x.mean(1, keepdim=True)
        x = x - level
        return level + self.trend(x) + self.rest(x)


def window(load, starts):
    at = starts[:, None] + torch.arange(PAST + AHEAD)
    both = load[at]
    return both[:, :PAST], both[:, PAST:]


def pinball(pred, target, q=0.6):
    d = target - pred
    return torch.maximum(q * d, (q - 1) * d).sum()


def add_up(state, bucket):
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda f: f.value()[0])


class Run:
    def __init__(self):
        self.multi = int(os.environ.get("WORLD_SIZE", 1)) > 1
        if self.multi:
            dist.init_process_group("gloo")
        self.rank = dist.get_rank() if self.multi else 0
        self.world = dist.get_world_size() if self.multi else 1
        torch.manual_seed(44)
        self.net = Forecaster()
        self.model = self.net
        if self.multi:
            self.model = DDP(self.net)
            self.model.register_comm_hook(None, add_up)
        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.2, momentum=0.9)
        self.sched = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, factor=0.4, patience=0, threshold=0.01)
        name = [tempfile.mkstemp(suffix=".pt")[1] if self.rank == 0 else None]
        if self.multi:
            dist.broadcast_object_list(name, src=0)
        self.path = name[0]

    def epoch(self, load, starts, number):
        order = starts[torch.randperm(len(starts), generator=torch.Generator().manual_seed(number))]
        for batch in order.split(BATCH):
            x, y = window(load, batch[self.rank::self.world])
            loss = pinball(self.model(x), y) / (len(batch) * AHEAD)
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()

    def validate(self, load, starts):
        value = torch.zeros(1)
        if self.rank == 0:
            with torch.no_grad():
                x, y = window(load, starts)
                value[0] = pinball(self.net(x), y) / y.numel()
        if self.multi:
            dist.broadcast(value, src=0)
        return value.item()


def main():
    run = Run()
    load = series()
    last = len(load) - PAST - AHEAD
    starts, valid = torch.arange(0, 386), torch.arange(386 + AHEAD, last)
    best, since = float("inf"), 0
    for number in range(EPOCHS):
        run.epoch(load, starts, number)
        value = run.validate(load, valid)
        run.sched.step(value)
        if value < best:
            best, since = value, 0
            if run.rank == 0:
                torch.save(run.net.state_dict(), run.path)
        else:
            since += 1
        if run.rank == 0:
            print(f"epoch {number} validation {value:.5f} lr {run.opt.param_groups[0]['lr']:.4f}")
        if since == 2:
            break
    if run.multi:
        dist.barrier()
    run.net.load_state_dict(torch.load(run.path))
    final = run.validate(load, valid)
    if run.rank == 0:
        print(f"best {best:.5f} restored {final:.5f}")
    if run.multi:
        dist.barrier()
        if run.rank == 0:
            os.remove(run.path)
        dist.destroy_process_group()
    else:
        os.remove(run.path)


if __name__ == "__main__":
    main()
