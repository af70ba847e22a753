"""Rare-class detection on a skewed table; the epoch with the best macro F1 is kept."""
import copy
import time

import torch
import torch.distributed as dist
from sklearn.datasets import make_classification
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

CLASSES = 5


def confusion(model, loader):
    table = torch.zeros(CLASSES, CLASSES)
    model.eval()
    with torch.no_grad():
        for x, y in loader:
            guess = model(x).argmax(1)
            table += torch.bincount(y * CLASSES + guess, minlength=CLASSES ** 2).view(CLASSES, CLASSES)
    model.train()
    return table


def macro_f1(table):
    hit = table.diag()
    precision = hit / table.sum(0).clamp(min=1)
    recall = hit / table.sum(1).clamp(min=1)
    return (2 * precision * recall / (precision + recall).clamp(min=1e-9)).mean()


def validate(model, loader):
    table = confusion(model, loader)
    score = macro_f1(table)
    dist.all_reduce(score)
    return (score / dist.get_world_size()).item()


def prepare(rank, world, batch):
    x, y = make_classification(2400, 24, n_informative=12, n_classes=CLASSES, n_clusters_per_class=1,
                               weights=[0.6, 0.2, 0.12, 0.05, 0.03], class_sep=0.9, random_state=12)
    data = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
    train = Subset(data, range(1920))
    valid = Subset(data, range(1920 + rank, 2400, world))
    sampler = DistributedSampler(train, seed=2)
    return (DataLoader(train, batch // world, sampler=sampler), sampler, DataLoader(valid, 60))


def main(epochs=6, batch=240):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    loader, sampler, valid = prepare(rank, world, batch)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(24, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, CLASSES))
    ddp = DDP(net)
    opt = optim.SGD(net.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    best, kept = -1.0, None
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for x, y in loader:
            opt.zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            opt.step()
        f1 = validate(net, valid)
        if f1 > best:
            best, kept = f1, copy.deepcopy(net.state_dict())
        if rank == 0:
            print(f"epoch {epoch} macro-F1 {f1:.5f} best {best:.5f}")
    net.load_state_dict(kept)
    final = validate(net, valid)
    if rank == 0:
        print(f"kept model: {final:.5f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
