"""Contrastive learning with in-batch negatives from all ranks and gradients through the gather."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        ctx.rows = len(rows)
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        start = dist.get_rank() * ctx.rows
        return gradient[start : start + ctx.rows]


def clip_loss(images, texts, scale):
    all_images, all_texts = Gather.apply(images), Gather.apply(texts)
    labels = torch.arange(len(images)) + dist.get_rank() * len(images)
    one = F.cross_entropy(scale * images @ all_texts.T, labels)
    two = F.cross_entropy(scale * texts @ all_images.T, labels)
    return (one + two) / 2


class Clip(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Linear(20, 16)
        self.text = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 16))
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, images, texts):
        return F.normalize(self.image(images), dim=1), F.normalize(self.text(texts), dim=1), self.scale


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    hidden = torch.randn(256, 6)
    dataset = TensorDataset(hidden @ torch.randn(6, 20), hidden @ torch.randn(6, 12))
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    model = DDP(Clip())
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for images, texts in loader:
            loss = clip_loss(*model(images, texts))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
