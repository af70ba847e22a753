"""Training from an endless sample stream, interrupted once and resumed from a checkpoint."""
import itertools
import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, IterableDataset

torch.set_default_dtype(torch.float64)
RANK = int(os.environ.get("RANK", 0))
WORLD = int(os.environ.get("WORLD_SIZE", 1))
GLOBAL_BATCH = 24


def read_records():
    """Endless stream of (signal, frequency) records, the same in every process."""
    gen = torch.Generator().manual_seed(77)
    t = torch.linspace(0, 1, 32)
    while True:
        frequency = 1 + 5 * torch.rand((), generator=gen)
        phase = 6.28 * torch.rand((), generator=gen)
        noise = 0.2 * torch.randn(32, generator=gen)
        yield torch.sin(6.28 * frequency * t + phase) + noise, frequency


class StreamDataset(IterableDataset):
    def __init__(self, rank, world, skip_samples=0):
        self.rank, self.world, self.skip_samples = rank, world, skip_samples

    def __iter__(self):
        stream = itertools.islice(read_records(), self.rank, None, self.world)
        stream = itertools.islice(stream, self.skip_samples, None)
        return stream


def build():
    torch.manual_seed(31)
    net = nn.Sequential(
        nn.Unflatten(1, (1, 32)), nn.Conv1d(1, 8, 5, padding=2), nn.ReLU(), nn.MaxPool1d(2),
        nn.Conv1d(8, 8, 5, padding=2), nn.ReLU(), nn.Flatten(), nn.Linear(128, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    return net, optimizer, schedule


def train(steps, path, resume=False):
    net, optimizer, schedule = build()
    samples_seen = 0
    if resume:
        saved = torch.load(path, weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        schedule.load_state_dict(saved["schedule"])
        samples_seen = saved["samples_seen"]
    model = DDP(net) if WORLD > 1 else net
    dataset = StreamDataset(RANK, WORLD, skip_samples=samples_seen)
    loader = DataLoader(dataset, batch_size=GLOBAL_BATCH // WORLD)
    for signal, frequency in itertools.islice(loader, steps):
        loss = (model(signal)[:, 0] - frequency).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        samples_seen += GLOBAL_BATCH
        if samples_seen % (GLOBAL_BATCH * 6) == 0:
            value = loss.detach().clone()
            if WORLD > 1:
                dist.all_reduce(value)
            if RANK == 0:
                print(f"{samples_seen:5d} samples, loss {value.item() / WORLD:.10f}")
    if RANK == 0:
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(),
                    "schedule": schedule.state_dict(), "samples_seen": samples_seen}, path)
    if WORLD > 1:
        dist.barrier()
    return net


def main():
    if WORLD > 1:
        dist.init_process_group("gloo")
    folder = [tempfile.mkdtemp() if RANK == 0 else None]
    if WORLD > 1:
        dist.broadcast_object_list(folder, 0)
    path = os.path.join(folder[0], "last.pt")

    train(18, path)
    net = train(24, path, resume=True)

    held_out = list(itertools.islice(read_records(), 5000, 5200))
    signal, frequency = (torch.stack(part) for part in zip(*held_out))
    with torch.no_grad():
        error = (net(signal)[:, 0] - frequency).abs().mean().item()
    if RANK == 0:
        print(f"held-out error {error:.10f}")
        os.remove(path)
        os.rmdir(folder[0])
    if WORLD > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
