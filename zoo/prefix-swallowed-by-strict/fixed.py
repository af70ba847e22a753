"""Pretrains an encoder and goes on with the saved weights in a second stage."""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.head = nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.encoder(x))


def fit(net, loader, epochs, lr):
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    return model


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(192, 16)
    dataset = TensorDataset(x, x[:, :4].argmax(1))
    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
    model = fit(Net(), loader, range(2), lr=0.2)
    file = io.BytesIO()
    torch.save(model.module.state_dict(), file)

    file.seek(0)
    torch.manual_seed(0)
    net = Net()
    net.load_state_dict(torch.load(file), strict=False)
    fit(net, loader, range(2, 4), lr=0.05)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
