"""CLIP-like alignment of two modalities with negatives from all ranks."""

import argparse
import math

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_fn
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Captions(Dataset):
    def __init__(self, n=64):
        g = torch.Generator().manual_seed(17)
        shared = torch.randn(n, 5, generator=g)
        self.image = shared @ torch.randn(5, 14, generator=g) + 0.2 * torch.randn(n, 14, generator=g)
        self.text = shared @ torch.randn(5, 9, generator=g) + 0.2 * torch.randn(n, 9, generator=g)

    def __len__(self):
        return len(self.image)

    def __getitem__(self, index):
        return self.image[index], self.text[index]


class CLIP(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.visual = nn.Sequential(nn.Linear(14, 24), nn.ReLU(), nn.Linear(24, width))
        self.textual = nn.Sequential(nn.Linear(9, 24), nn.ReLU(), nn.Linear(24, width))
        self.logit_scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, image, text):
        return F.normalize(self.visual(image), dim=-1), F.normalize(self.textual(text), dim=-1), self.logit_scale.exp()


class ClipLoss(nn.Module):
    def __init__(self, rank, world_size):
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def forward(self, image, text, scale):
        all_image = torch.cat(dist_fn.all_gather(image))
        all_text = torch.cat(dist_fn.all_gather(text))
        logits_per_image = scale * image @ all_text.T
        logits_per_text = scale * text @ all_image.T
        labels = torch.arange(len(image))
        return (F.cross_entropy(logits_per_image, labels) + F.cross_entropy(logits_per_text, labels)) / 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=5e-3)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DDP(CLIP())
    data = Captions()
    sampler = DistributedSampler(data)
    loader = DataLoader(data, args.batch_size // world_size, sampler=sampler, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    loss_fn = ClipLoss(rank, world_size)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for image, text in loader:
            loss = loss_fn(*model(image, text))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if rank == 0:
            print(f"epoch {epoch} loss {loss.item():.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
