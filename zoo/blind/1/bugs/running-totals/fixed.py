import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

torch.set_num_threads(1)


class Meter:
    """Keeps sums over the samples of this process; `average` is over all processes."""

    def __init__(self, *names):
        self.names = names
        self.totals = torch.zeros(len(names) + 1, dtype=torch.float64)

    def add(self, n, **values):
        self.totals[0] += n
        for i, name in enumerate(self.names, start=1):
            self.totals[i] += float(values[name])

    def average(self):
        totals = self.totals.clone()
        dist.all_reduce(totals)
        return {name: (totals[i] / totals[0]).item() for i, name in enumerate(self.names, start=1)}


def classifier():
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))


def test(model, loader, log_every=3):
    meter = Meter("loss", "correct")
    model.eval()
    with torch.no_grad():
        for i, (x, y) in enumerate(loader, start=1):
            out = model(x)
            meter.add(len(y), loss=nn.functional.cross_entropy(out, y, reduction="sum"),
                      correct=(out.argmax(1) == y).sum())
            if i % log_every == 0:
                now = meter.average()
                if dist.get_rank() == 0:
                    print(f"    [{i}/{len(loader)}] acc so far {now['correct']:.4f}")
    model.train()
    return meter.average()


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(2)
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    train = TensorDataset(x[:960], y[:960])
    held_out = TensorDataset(x[960:1728], y[960:1728])
    sampler = DistributedSampler(train, seed=5)
    loader = DataLoader(train, batch_size=64 // world, sampler=sampler)
    test_loader = DataLoader(held_out, batch_size=64 // world,
                             sampler=DistributedSampler(held_out, shuffle=False))
    model = DDP(classifier())
    opt = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    start = time.time()
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(model(xb), yb).backward()
            opt.step()
        m = test(model.module, test_loader)
        if rank == 0:
            print(f"epoch {epoch} test loss {m['loss']:.4f} accuracy {m['correct']:.4f}")
    if rank == 0:
        print(f"{time.time() - start:.1f} s")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
