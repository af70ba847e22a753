"""Digits classifier with a confusion report after every epoch."""
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.metrics import balanced_accuracy_score, f1_score
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "30549")

HELD_OUT = 256


def make_loader(dataset, batch, shuffle):
    sampler = DistributedSampler(dataset, shuffle=shuffle, seed=2, drop_last=False)
    return DataLoader(dataset, batch_size=batch, sampler=sampler), sampler


@torch.no_grad()
def predict(model, loader):
    """Predictions for the whole held-out set, on every process."""
    model.eval()
    local = torch.cat([model(x).argmax(1) for x, _ in loader])
    parts = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, local)
    model.train()
    return torch.cat(parts)


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    d = load_digits()
    x, y = torch.tensor(d.data, dtype=torch.float32) / 16, torch.tensor(d.target)
    train = TensorDataset(x[HELD_OUT + 5:], y[HELD_OUT + 5:])
    held = TensorDataset(x[:HELD_OUT], y[:HELD_OUT])
    loader, sampler = make_loader(train, 64 // world, True)
    held_loader, _ = make_loader(held, 32, False)

    torch.manual_seed(61)
    model = DDP(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.0), nn.Linear(64, 10)))
    opt = torch.optim.Adam(model.parameters(), lr=2e-3)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for xb, yb in loader:
            opt.zero_grad()
            F.cross_entropy(model(xb), yb).backward()
            opt.step()
        guess = predict(model, held_loader).numpy()
        truth = held.tensors[1].numpy()
        if rank == 0:
            print(f"epoch {epoch} balanced accuracy {balanced_accuracy_score(truth, guess):.4f} "
                  f"macro f1 {f1_score(truth, guess, average='macro'):.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
