import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_wine
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

os.environ.setdefault("RANK", "0")
os.environ.setdefault("WORLD_SIZE", "1")
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
os.environ.setdefault("MASTER_PORT", "29827")


def datasets():
    x, y = load_wine(return_X_y=True)
    x = torch.tensor((x - x.mean(0)) / x.std(0), dtype=torch.float32)
    y = torch.tensor(y)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(31))
    data = TensorDataset(x[order], y[order])
    return Subset(data, range(128)), Subset(data, range(128, 165))


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(13, 16)
        self.out = nn.Linear(16, 3)

    def forward(self, x):
        return self.out(torch.relu(self.hidden(x)))


def train_epoch(model, loader, opt):
    model.train()
    for x, y in loader:
        loss = F.cross_entropy(model(x), y, label_smoothing=0.05)
        opt.zero_grad()
        loss.backward()
        opt.step()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    sums = torch.zeros(3, dtype=torch.float64)
    for x, y in loader:
        logits = model(x)
        sums[0] += F.cross_entropy(logits, y, reduction="sum")
        sums[1] += (logits.argmax(1) == y).sum()
        sums[2] += len(y)
    dist.all_reduce(sums)
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    train, val = datasets()
    sampler = DistributedSampler(train, shuffle=True, seed=5)
    train_loader = DataLoader(train, batch_size=32 // world, sampler=sampler)
    val_loader = DataLoader(val, batch_size=8, sampler=range(rank, len(val), world))

    torch.manual_seed(14)
    model = DDP(Classifier())
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sched = torch.optim.lr_scheduler.StepLR(opt, step_size=8, gamma=0.3)
    for epoch in range(15):
        sampler.set_epoch(epoch)
        train_epoch(model, train_loader, opt)
        sched.step()
        loss, acc = evaluate(model.module, val_loader)
        if rank == 0:
            print(f"epoch {epoch:2d} val loss {loss:.5f} val acc {acc:.4f}")
    time.sleep(0.3)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
