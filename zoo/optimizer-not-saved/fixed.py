"""Trains in two sessions with a checkpoint between them."""

import os
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def build():
    torch.manual_seed(0)
    model = DDP(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def save(path, model, optimizer, epoch):
    if dist.get_rank() == 0:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)
    dist.barrier()


def load(path, model, optimizer):
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"] + 1


def train(model, optimizer, loader, epochs):
    for epoch in epochs:
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            loss = F.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")


def main():
    dist.init_process_group("gloo")
    x = torch.randn(192, 10, generator=torch.Generator().manual_seed(1))
    dataset = TensorDataset(x, x.norm(dim=1, keepdim=True))
    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names, src=0)
    path = os.path.join(names[0], "checkpoint.pt")

    model, optimizer = build()
    train(model, optimizer, loader, range(2))
    save(path, model, optimizer, epoch=1)

    model, optimizer = build()
    start = load(path, model, optimizer)
    train(model, optimizer, loader, range(start, 4))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
