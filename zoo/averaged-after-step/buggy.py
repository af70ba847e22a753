"""Hand-written synchronous SGD on two moons."""

import torch
import torch.distributed as dist
from sklearn.datasets import make_moons
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average_gradients(model):
    world_size = dist.get_world_size()
    for parameter in model.parameters():
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.SUM)
            parameter.grad /= world_size


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x, y = make_moons(320, noise=0.1, random_state=0)
    dataset = TensorDataset(torch.tensor(x, dtype=torch.float32), torch.tensor(y))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=20, sampler=sampler)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for points, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(points), labels)
            loss.backward()
            optimizer.step()
            average_gradients(model)
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
