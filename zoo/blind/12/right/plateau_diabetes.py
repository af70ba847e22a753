"""Quantile regression on the diabetes data: plateau schedule, early stopping and the best checkpoint, decided by process 0."""
import os
import shutil
import tempfile
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Sampler, TensorDataset

QUANTILES = torch.tensor([0.1, 0.5, 0.9])


class ShardSampler(Sampler):
    """Shuffles with the epoch as seed, drops the tail that does not fill a global batch, hands out this process's rows."""

    def __init__(self, size, batch, rank, world):
        self.size, self.batch, self.rank, self.world, self.epoch = size, batch, rank, world, 0

    def __len__(self):
        return self.size // self.batch * self.batch // self.world

    def __iter__(self):
        order = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.epoch))
        order = order[: self.size // self.batch * self.batch].view(-1, self.world, self.batch // self.world)
        self.epoch += 1
        return iter(order[:, self.rank].flatten().tolist())


class EarlyStopping:
    def __init__(self, patience, path):
        self.patience, self.path, self.best, self.bad = patience, path, float("inf"), 0

    def __call__(self, value, net):
        if value < self.best - 1e-4:
            self.best, self.bad = value, 0
            torch.save(net.state_dict(), self.path)
        else:
            self.bad += 1
        return self.bad >= self.patience


def pinball(prediction, target):
    error = target[:, None] - prediction
    return torch.maximum(QUANTILES * error, (QUANTILES - 1) * error).mean()


def load():
    X, y = load_diabetes(return_X_y=True)
    X, X_test, y, y_test = train_test_split(X, y, test_size=70, random_state=0)
    X, X_val, y, y_val = train_test_split(X, y, test_size=60, random_state=0)
    xs, ys = StandardScaler().fit(X), StandardScaler().fit(y[:, None])
    def make(a, b):
        return torch.tensor(xs.transform(a)).float(), torch.tensor(ys.transform(b[:, None])[:, 0]).float()
    return make(X, y), make(X_val, y_val), make(X_test, y_test)


def main():
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rank, world = dist.get_rank(), dist.get_world_size()
    (X, y), (X_val, y_val), (X_test, y_test) = load()
    torch.manual_seed(17 * rank + 1)
    net = nn.Sequential(nn.Linear(10, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 3))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3, eps=1e-4)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
    loader = DataLoader(TensorDataset(X, y), batch_size=48 // world, sampler=ShardSampler(len(X), 48, rank, world))

    folder = [None]
    if rank == 0:
        folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, src=0)
    best = os.path.join(folder[0], "best.pt")
    stopper = EarlyStopping(4, best)

    for epoch in range(40):
        model.train()
        for a, b in loader:
            optimizer.zero_grad()
            pinball(model(a), b).backward()
            nn.utils.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
        verdict = [None, None]
        if rank == 0:
            model.eval()
            with torch.no_grad():
                value = pinball(net(X_val), y_val).item()
            verdict = [value, stopper(value, net)]
        dist.broadcast_object_list(verdict, src=0)
        schedule.step(verdict[0])
        if rank == 0:
            print(f"epoch {epoch} val {verdict[0]:.5f} lr {optimizer.param_groups[0]['lr']:.1e}", flush=True)
        if verdict[1]:
            break

    net.load_state_dict(torch.load(best, map_location="cpu"))
    dist.barrier()
    if rank == 0:
        with torch.no_grad():
            inside = ((net(X_test)[:, 0] < y_test) & (y_test < net(X_test)[:, 2])).float().mean()
            print(f"stopped after {epoch + 1} epochs, test {pinball(net(X_test), y_test).item():.5f}, inside {inside.item():.3f}")
        shutil.rmtree(folder[0])
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
