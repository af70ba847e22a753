"""House-price style regression with a validation loss per epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def houses(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 8, generator=g) * 4
    y = (x[:, :1] * x[:, 1:2]).sqrt() + torch.randn(n, 1, generator=g).exp()
    return TensorDataset(x, y)


def validate(net, loader):
    net.eval()
    total = torch.zeros(2)
    with torch.no_grad():
        for x, y in loader:
            loss = F.mse_loss(net(x), y)
            total += torch.tensor([loss.item() * len(x), len(x)])
    dist.all_reduce(total)
    net.train()
    return (total[0] / total[1]).item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, valid_set = houses(256, 1), houses(134, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=32, sampler=sampler)
    valid_loader = DataLoader(valid_set, batch_size=32, sampler=DistributedSampler(valid_set, shuffle=False))
    net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    best = float("inf")
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        valid = validate(net, valid_loader)
        best = min(best, valid)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: valid {valid:.4f}, best {best:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
