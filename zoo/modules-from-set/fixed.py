"""Trains one small encoder per input field, joined by a linear head."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler

FIELDS = {"price", "colour", "weight", "origin", "vendor", "season"}


class Products(Dataset):
    def __init__(self, n=256):
        generator = torch.Generator().manual_seed(11)
        self.values = {name: torch.randn(n, 8, generator=generator) for name in sorted(FIELDS)}
        self.sales = sum(v[:, 0] * k for k, v in enumerate(self.values.values(), 1))

    def __len__(self):
        return len(self.sales)

    def __getitem__(self, index):
        return {name: v[index] for name, v in self.values.items()}, self.sales[index]


class FieldEncoders(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoders = nn.ModuleDict()
        for name in sorted(FIELDS):
            self.encoders[name] = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, fields):
        hidden = sum(torch.relu(self.encoders[name](fields[name])) for name in sorted(FIELDS))
        return self.head(hidden).squeeze(1)


def main():
    dist.init_process_group("gloo")
    rank = int(os.environ["RANK"])
    torch.manual_seed(3)
    model = DDP(FieldEncoders())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = Products()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=16, sampler=sampler)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for fields, sales in loader:
            loss = nn.functional.mse_loss(model(fields), sales)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(epoch, loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
