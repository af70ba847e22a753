"""Data parallelism without DDP: own seeds, broadcast weights, averaged gradients."""

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def broadcast(model):
    for tensor in model.state_dict().values():
        dist.broadcast(tensor, src=0)


def average_gradients(model):
    works = [dist.all_reduce(p.grad, async_op=True) for p in model.parameters()]
    for work, parameter in zip(works, model.parameters(), strict=True):
        work.wait()
        parameter.grad /= dist.get_world_size()


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    digits = load_digits()
    dataset = TensorDataset(torch.tensor(digits.data[:512]).float() / 16, torch.tensor(digits.target[:512]))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=32, sampler=sampler)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    broadcast(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            average_gradients(model)
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
