"""A multi-process trainer for a small regression network."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(240, 5)
    dataset = TensorDataset(x, x.prod(1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler)
    net = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 1))
    model = nn.DataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(bx), by)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
