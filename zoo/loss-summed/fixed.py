"""Regresses digits' total ink with an MLP and a summed squared error."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    torch.manual_seed(0)
    images = torch.tensor(load_digits().data[:512], dtype=torch.float32) / 16
    dataset = TensorDataset(images, images.mean(1, keepdim=True) * 4)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=64 // world_size, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    criterion = nn.MSELoss(reduction="sum")
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = criterion(model(x), y) * world_size
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
