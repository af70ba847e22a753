"""A wine-like classifier with gradient accumulation over windows of four."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_wine
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WINDOW = 4


def load():
    wine = load_wine()
    x = torch.tensor(wine.data, dtype=torch.float32)
    x = (x - x.mean(0)) / x.std(0)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[:168]
    return TensorDataset(x[order], torch.tensor(wine.target)[order])


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = load()
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(13, 20), nn.ReLU(), nn.Linear(20, 3)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(4):
        sampler.set_epoch(epoch)
        for i, (x, y) in enumerate(loader):
            start = i - i % WINDOW
            size = min(WINDOW, len(loader) - start)
            loss = nn.functional.cross_entropy(model(x), y)
            (loss / size).backward()
            if i + 1 == start + size:
                optimizer.step()
                optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
