"""Trains a regressor and lowers the rate when the validation loss stagnates."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def noisy(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g)
    y = x[:, :1] * x[:, 1:2] + 0.8 * torch.randn(n, 1, generator=g)
    return TensorDataset(x, y)


@torch.no_grad()
def validation_loss(net, loader):
    net.eval()
    total, count = torch.zeros(()), 0
    for x, y in loader:
        total += F.mse_loss(net(x), y, reduction="sum")
        count += len(x)
    net.train()
    loss = total / count
    return loss.item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, valid_set = noisy(64, seed=1), noisy(32, seed=2)
    sampler = DistributedSampler(train_set)
    train_loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    valid_loader = DataLoader(valid_set, batch_size=16, sampler=DistributedSampler(valid_set, shuffle=False))
    model = DDP(nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0)
    for epoch in range(8):
        sampler.set_epoch(epoch)
        for x, y in train_loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        valid = validation_loss(model.module, valid_loader)
        scheduler.step(valid)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: valid {valid:.4f}, lr {optimizer.param_groups[0]['lr']:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
