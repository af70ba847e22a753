"""Classifies animals from measurements; labels are read as names."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

NAMES = ["cat", "dog", "horse", "sheep", "goat", "hen"]


def read_table(rows=288):
    g = torch.Generator().manual_seed(8)
    kinds = torch.randint(0, len(NAMES), (rows,), generator=g)
    values = torch.randn(rows, 9, generator=g) + kinds[:, None] * torch.linspace(-1, 1, 9)
    return values, [NAMES[k] for k in kinds.tolist()]


class Animals(Dataset):
    def __init__(self):
        self.values, self.names = read_table()
        self.classes = {name: number for number, name in enumerate(sorted(set(self.names)))}

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        return self.values[index], self.classes[self.names[index]]


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.fc1 = nn.Linear(9, 24)
        self.fc2 = nn.Linear(24, classes)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Animals()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=18, sampler=sampler)
    model = DDP(Net(len(dataset.classes)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for values, kind in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(values), kind)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
