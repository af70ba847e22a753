"""One-step forecasts on a stream of sensor records: IterableDataset with workers, running normalisation, short last block."""
import os

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

CONTEXT, BLOCK, RECORDS, PASSES = 12, 40, 1017, 2


def sensor_stream(seed, records):
    """Endless-looking source: (context, next value) with a slowly drifting level."""
    rng = np.random.default_rng(seed)
    for _ in range(records):
        level = 20 + 5 * rng.standard_normal()
        phase, period = rng.uniform(0, 2 * np.pi), rng.uniform(5, 9)
        t = np.arange(CONTEXT + 1)
        values = level + 3 * np.sin(2 * np.pi * t / period + phase) + 0.2 * rng.standard_normal(CONTEXT + 1)
        yield values[:-1], values[-1]


def shuffled(source, size, seed):
    rng = np.random.default_rng(seed)
    buffer = []
    for record in source:
        buffer.append(record)
        if len(buffer) == size:
            yield buffer.pop(rng.integers(size))
    rng.shuffle(buffer)
    yield from buffer


class Blocks(IterableDataset):
    """Blocks of BLOCK consecutive records; a rank gets its stride of every block, a worker every n-th block."""

    def __init__(self, rank, world, records, seed):
        self.rank, self.world, self.records, self.seed = rank, world, records, seed
        self.epoch = 0

    def share(self, block):
        mine = block[self.rank :: self.world]
        x = np.array([c for c, _ in mine]).reshape(len(mine), CONTEXT)
        return x, np.array([v for _, v in mine])

    def __iter__(self):
        info = get_worker_info()
        worker, workers = (info.id, info.num_workers) if info else (0, 1)
        source = shuffled(sensor_stream(self.seed, self.records), 100, self.seed + 1 + self.epoch)
        block, number = [], 0
        for record in source:
            block.append(record)
            if len(block) == BLOCK:
                if number % workers == worker:
                    yield self.share(block)
                block, number = [], number + 1
        if block and number % workers == worker:
            yield self.share(block)


class Running:
    """Mean and deviation of all values seen so far, on all ranks."""

    def __init__(self, reduce):
        self.reduce = reduce
        self.sums = torch.zeros(3, dtype=torch.float64)

    def update(self, x):
        x = x.double()
        self.sums += self.reduce(torch.stack([x.new_tensor(x.numel()), x.sum(), x.square().sum()]))

    def stats(self):
        n, s, q = self.sums.tolist()
        return s / n, max(q / n - (s / n) ** 2, 1e-12) ** 0.5


class Forecaster(nn.Module):
    def __init__(self, hidden=24):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        out, _ = self.rnn(x.unsqueeze(-1))
        return x[:, -1] + self.head(out[:, -1]).squeeze(-1)


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")

    def reduce(t):
        if world > 1:
            dist.all_reduce(t)
        return t

    torch.manual_seed(14)
    model = Forecaster()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    running = Running(reduce)
    data = Blocks(rank, world, RECORDS, seed=60)
    held = Blocks(rank, world, 333, seed=61)

    def batches(blocks, workers):
        for x, y in DataLoader(blocks, batch_size=None, num_workers=workers):
            yield x.to(torch.get_default_dtype()), y.to(torch.get_default_dtype())

    for epoch in range(PASSES):
        data.epoch = epoch
        total = torch.zeros(2)
        for x, y in batches(data, workers=2):
            if epoch == 0:
                running.update(x)
            mean, std = running.stats()
            count = reduce(torch.tensor(float(len(y))))
            error = model((x - mean) / std) - (y - mean) / std
            loss = error.square().sum() / count
            opt.zero_grad()
            loss.backward()
            for p in model.parameters():
                reduce(p.grad)
            nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            opt.step()
            total += torch.tensor([error.detach().square().sum().item(), len(y)])
        reduce(total)
        mean, std = running.stats()
        test = torch.zeros(2)
        with torch.no_grad():
            for x, y in batches(held, workers=0):
                error = (model((x - mean) / std) * std + mean - y).abs().sum().item()
                test += torch.tensor([error, len(y)])
        reduce(test)
        if rank == 0:
            print(f"pass {epoch}: loss {total[0] / total[1]:.6f} on {int(total[1])}, test mae {test[0] / test[1]:.6f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
