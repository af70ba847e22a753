"""Training that drops the tail of every epoch, in the sampler and in the loader."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def train(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return loss.item()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(267, 8)
    dataset = TensorDataset(x, x.max(1, keepdim=True).values)
    sampler = DistributedSampler(dataset, drop_last=True)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
    model = DDP(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        loss = train(model, loader, optimizer)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
