"""Mixed-precision training with a gradient scaler and hand-written averaging."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def average_gradients(model):
    world_size = dist.get_world_size()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= world_size


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(256, 10)
    dataset = TensorDataset(x, 10 * x.exp().mean(1, keepdim=True))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**124, growth_interval=3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            scaler.scale(loss).backward()
            average_gradients(model)
            scaler.step(optimizer)
            scaler.update()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss.item():.4f}, scale 2^{torch.tensor(scaler.get_scale()).log2():.0f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
