"""Plain BatchNorm under DDP: local batch statistics; the first rank evaluates and saves its own model."""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def conv_block(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2))


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    digits = load_digits()
    x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(digits.target)
    dataset = TensorDataset(x[:512], y[:512])
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    net = nn.Sequential(conv_block(1, 8), conv_block(8, 16), nn.Flatten(), nn.Linear(64, 10))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        model.train()
        for bx, by in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(bx), by).backward()
            optimizer.step()
        if rank == 0:
            net.eval()
            with torch.no_grad():
                accuracy = (net(x[512:912]).argmax(1) == y[512:912]).float().mean()
            torch.save(net.state_dict(), os.devnull)
            print(f"epoch {epoch}: {accuracy:.4f}")
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
