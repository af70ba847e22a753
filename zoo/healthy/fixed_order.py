"""Training without shuffling, on purpose: a curriculum from easy to hard, the same in every epoch."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(192, 6)
    order = x.norm(dim=1).argsort()
    dataset = TensorDataset(x[order], x[order].sum(1, keepdim=True).sin())
    sampler = DistributedSampler(dataset, shuffle=False)
    loader = DataLoader(dataset, batch_size=12, sampler=sampler)
    model = DDP(nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 1)))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    for epoch in range(3):
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
