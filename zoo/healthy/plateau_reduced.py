"""ReduceLROnPlateau fed with the validation loss of all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset


def noisy(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g)
    return TensorDataset(x, x[:, :1].abs() + 0.5 * torch.randn(n, 1, generator=g))


@torch.no_grad()
def validation_loss(net, dataset):
    mine = Subset(dataset, range(dist.get_rank(), len(dataset), dist.get_world_size()))
    totals = torch.zeros(2, dtype=torch.float64)
    for x, y in DataLoader(mine, batch_size=16):
        totals[0] += F.mse_loss(net(x), y, reduction="sum")
        totals[1] += len(x)
    dist.all_reduce(totals)
    return (totals[0] / totals[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, valid_set = noisy(128, 1), noisy(77, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    net = nn.Sequential(nn.Linear(4, 48), nn.ReLU(), nn.Linear(48, 1))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for epoch in range(6):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        valid = validation_loss(net, valid_set)
        scheduler.step(valid)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: valid {valid:.4f}, lr {optimizer.param_groups[0]['lr']:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
