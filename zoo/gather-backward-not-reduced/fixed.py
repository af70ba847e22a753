"""Contrastive learning of two views with negatives from all ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class GatherLayer(torch.autograd.Function):
    """Rows of all ranks, with gradients."""

    @staticmethod
    def forward(ctx, z):
        parts = [torch.empty_like(z) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, z.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def info_nce(queries, keys, temperature=0.2):
    everyone = GatherLayer.apply(keys)
    logits = queries @ everyone.T / temperature
    labels = torch.arange(len(queries)) + dist.get_rank() * len(queries)
    return F.cross_entropy(logits, labels)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(20, 40), nn.ReLU(), nn.Linear(40, 16))

    def forward(self, one, two):
        z = F.normalize(self.net(torch.cat([one, two])), dim=1)
        return z.chunk(2)


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    base = torch.randn(256, 20)
    dataset = TensorDataset(base + 0.1 * torch.randn(256, 20), base + 0.1 * torch.randn(256, 20))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler, drop_last=True)
    model = DDP(Encoder())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for one, two in loader:
            loss = info_nce(*model(one, two))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
