"""Trains and saves after every epoch."""

import io
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def save(model, optimizer, epoch):
    file = io.BytesIO()
    torch.save({"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, file)
    print(f"epoch {epoch}: saved {file.tell()} bytes")


def main():
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    torch.manual_seed(0)
    x = torch.randn(192, 11)
    dataset = TensorDataset(x, x[:, :4].argmax(1))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(11, 22), nn.ReLU(), nn.Linear(22, 4)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        if dist.get_rank() == 0:
            save(model, optimizer, epoch)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
