"""Gathers all test predictions and scores them against the table of labels."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_wine
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def wine():
    data = load_wine()
    x = torch.tensor(data.data, dtype=torch.float32)
    x, y = (x - x.mean(0)) / x.std(0), torch.tensor(data.target)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    train, test = order[:120], order[120:176]
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test])


@torch.no_grad()
def predict(net, dataset):
    loader = DataLoader(dataset, batch_size=14, sampler=DistributedSampler(dataset, shuffle=False))
    mine = torch.cat([net(x).argmax(1) for x, _ in loader])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    return torch.cat(parts)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, test_set = wine()
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=12, sampler=sampler)
    net = nn.Linear(13, 3)
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        accuracy = (predict(net, test_set) == test_set.tensors[1]).float().mean()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
