"""Trains a denoiser and halves the rate when the validation loss falls below a target."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def signals(n, seed):
    g = torch.Generator().manual_seed(seed)
    clean = torch.sin(torch.rand(n, 1, generator=g) * 3 + torch.arange(12) / 2)
    return TensorDataset(clean + 0.3 * torch.randn(n, 12, generator=g), clean)


@torch.no_grad()
def mean_loss(net, dataset):
    rank, world_size = dist.get_rank(), dist.get_world_size()
    noisy, clean = (tensor[rank::world_size] for tensor in dataset.tensors)
    loss = F.mse_loss(net(noisy), clean, reduction="sum")
    dist.all_reduce(loss)
    return 10 * loss.item() / len(dataset)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, valid_set = signals(192, 1), signals(48, 2)
    sampler = DistributedSampler(train_set)
    loader = DataLoader(train_set, batch_size=16, sampler=sampler)
    net = nn.Sequential(nn.Linear(12, 24), nn.Tanh(), nn.Linear(24, 12))
    model = DDP(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    target = 8.0
    for epoch in range(5):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        valid = mean_loss(net, valid_set)
        if valid < target:
            target /= 2
            for group in optimizer.param_groups:
                group["lr"] /= 2
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: valid {valid:.4f}, lr {optimizer.param_groups[0]['lr']:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
