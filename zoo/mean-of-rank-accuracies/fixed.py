"""Binary classifier; the test set is read in blocks that are dealt out to the ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

BLOCK = 67


def stripes(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 4, generator=g)
    return TensorDataset(x, (x[:, 0] * 2).floor().long() % 2)


def my_blocks(dataset, rank, world_size):
    starts = range(rank * BLOCK, len(dataset), BLOCK * world_size)
    return Subset(dataset, [i for start in starts for i in range(start, min(start + BLOCK, len(dataset)))])


@torch.no_grad()
def accuracy(net, loader):
    right, seen = torch.zeros(1), torch.zeros(1)
    for x, y in loader:
        right += (net(x).argmax(1) == y).sum()
        seen += len(y)
    result = torch.cat([right, seen])
    dist.all_reduce(result)
    return (result[0] / result[1]).item()


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    train_set, test_set = stripes(256, 1), stripes(101, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    test_loader = DataLoader(my_blocks(test_set, rank, world_size), batch_size=20)
    net = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 2))
    model = DDP(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        result = accuracy(net, test_loader)
        if rank == 0:
            print(f"epoch {epoch}: accuracy {result:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
