"""Trains, restores the best weights and fine-tunes them at a low rate."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def sample(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=g)
    return TensorDataset(x, x[:, :1] * x[:, 1:2] + torch.randn(n, 1, generator=g))


def epoch_of(model, loader, optimizer, number):
    loader.sampler.set_epoch(number)
    for x, y in loader:
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


@torch.no_grad()
def validate(net, dataset):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    x, y = (tensor[rank::world_size] for tensor in dataset.tensors)
    loss = F.mse_loss(net(x), y)
    return loss.item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, valid_set = sample(96, 1), sample(16, 2)
    loader = DataLoader(train_set, batch_size=12, sampler=DistributedSampler(train_set))
    net = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 1))
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    best_loss, best, best_epoch = float("inf"), None, 0
    for epoch in range(6):
        epoch_of(model, loader, optimizer, epoch)
        valid = validate(net, valid_set)
        if valid < best_loss:
            best_loss, best, best_epoch = valid, copy.deepcopy(net.state_dict()), epoch
    print(f"rank {dist.get_rank()}: best epoch {best_epoch}, loss {best_loss:.4f}")
    net.load_state_dict(best)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    epoch_of(model, loader, optimizer, 6)
    print(f"rank {dist.get_rank()}: final {validate(net, valid_set):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
