"""Standardises features and fits a small network to the breast cancer data."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_breast_cancer
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def standardised(rank, world_size, n=512):
    data = load_breast_cancer()
    features = torch.tensor(data.data[:n], dtype=torch.float32)
    labels = torch.tensor(data.target[:n], dtype=torch.float32)
    sample = features
    return TensorDataset((features - sample.mean(0)) / sample.std(0), labels)


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    dataset = standardised(rank, world_size)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            loss = nn.functional.binary_cross_entropy_with_logits(model(x).squeeze(1), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
