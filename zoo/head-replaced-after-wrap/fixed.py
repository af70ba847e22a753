"""Fine-tunes a pretrained body with a new head for five classes."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

CLASSES = 5


class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU())
        self.head = nn.Linear(40, classes)

    def forward(self, x):
        return self.head(self.body(x))


def make_dataset():
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(320, 20, generator=generator)
    w = torch.randn(20, CLASSES, generator=generator)
    return TensorDataset(x, (x @ w).argmax(1))


def train(model, loader, sampler, epochs=3):
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {total / len(loader):.4f}")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net = Net(classes=1000)
    net.head = nn.Linear(40, CLASSES)
    model = DDP(net, find_unused_parameters=True)
    dataset = make_dataset()
    sampler = DistributedSampler(dataset)
    train(model, DataLoader(dataset, batch_size=20, sampler=sampler), sampler)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
