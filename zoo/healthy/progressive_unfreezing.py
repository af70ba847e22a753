"""Progressive unfreezing that wraps the model anew in every stage."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def stage(net, trainable, loader, first, epochs):
    for name, parameter in net.named_parameters():
        parameter.requires_grad = name.startswith(trainable)
    model = DDP(net)
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    for epoch in range(first, first + epochs):
        loader.sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}, {trainable}: {loss.item():.4f}")


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    x = torch.randn(192, 10)
    dataset = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
    loader = DataLoader(dataset, batch_size=16, sampler=DistributedSampler(dataset))
    net = nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 2))
    stage(net, ("2.",), loader, first=0, epochs=2)
    stage(net, ("0.", "2."), loader, first=2, epochs=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
