"""Trains a perceptron on iris with two loader workers."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_iris
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Iris(Dataset):
    def __init__(self):
        iris = load_iris()
        self.x = torch.tensor(iris.data, dtype=torch.float32)
        self.y = torch.tensor(iris.target)

    def __len__(self):
        return 144

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def main(epochs=3):
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Iris()
    sampler = DistributedSampler(dataset, seed=13)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler, num_workers=2)
    model = DDP(nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        total = 0.0
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {total / len(loader):.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
