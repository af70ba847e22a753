"""Trains on two spirals and evaluates on all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset


class Spirals(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.y = torch.randint(0, 2, (n,), generator=g)
        t = torch.rand(n, generator=g) * 6 + 1
        angle = t + self.y * 3.14159
        self.x = torch.stack([t * angle.cos(), t * angle.sin()], 1) / 4 + 0.05 * torch.randn(n, 2, generator=g)

    def __len__(self):
        return len(self.y)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def loaders(batch_size):
    train_set, test_set = Spirals(256, 1), Spirals(150, 2)
    train = DataLoader(train_set, batch_size=batch_size, sampler=DistributedSampler(train_set), drop_last=True)
    mine = Subset(test_set, range(dist.get_rank(), len(test_set), dist.get_world_size()))
    test = DataLoader(mine, batch_size=batch_size, drop_last=True)
    return train, test


def evaluate(net, loader):
    net.eval()
    totals = torch.zeros(3)
    with torch.no_grad():
        for x, y in loader:
            logits = net(x)
            loss = F.cross_entropy(logits, y, reduction="sum").item()
            totals += torch.tensor([loss, (logits.argmax(1) == y).sum().item(), len(y)])
    dist.all_reduce(totals)
    net.train()
    return totals[0] / totals[2], totals[1] / totals[2]


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, test = loaders(batch_size=20)
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 2))
    model = DDP(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for epoch in range(3):
        train.sampler.set_epoch(epoch)
        for x, y in train:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss, accuracy = evaluate(net, test)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: test loss {loss:.4f}, accuracy {accuracy:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
