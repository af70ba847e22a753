"""Resumes momentum SGD from a checkpoint in memory."""

import io

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(9, 18), nn.ReLU(), nn.Linear(18, 3))
    return net, torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def train(net, optimizer, loader, epochs):
    model = DDP(net)
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")


def resume(file):
    net, optimizer = build()
    file.seek(0)
    state = torch.load(file)
    net.load_state_dict(state["net"])
    if "optimizer" in state:
        optimizer.load_state_dict(state["optimizer"])
    return net, optimizer


def main():
    dist.init_process_group("gloo")
    x = torch.randn(192, 9, generator=torch.Generator().manual_seed(6))
    dataset = TensorDataset(x, x[:, :3].argmax(1))
    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
    net, optimizer = build()
    train(net, optimizer, loader, range(2))
    file = io.BytesIO()
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    net, optimizer = resume(file)
    train(net, optimizer, loader, range(2, 4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
