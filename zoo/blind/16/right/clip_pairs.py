"""Contrastive pairs: images of digits against noisy captions, negatives from every rank.

Each rank scores its own rows against all columns; features travel with their gradients.
"""
import math
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

GLOBAL_BATCH, EPOCHS, CAPTION = 64, 2, 20


class GatherLayer(torch.autograd.Function):
    """all_gather whose backward sums the gradients that all ranks hold for a feature."""

    @staticmethod
    def forward(ctx, x):
        out = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x)
        return tuple(out)

    @staticmethod
    def backward(ctx, *grads):
        whole = torch.stack(grads)
        dist.all_reduce(whole)
        return whole[dist.get_rank()]


class Pairs(torch.utils.data.Dataset):
    def __init__(self, start, stop):
        digits = load_digits()
        self.images = torch.tensor(digits.data[start:stop] / 16.0, dtype=torch.float32)
        g = torch.Generator().manual_seed(1)
        words = torch.randn(10, CAPTION, generator=g)
        label = torch.tensor(digits.target[start:stop])
        brightness = self.images.view(-1, 4, 16).mean(2)
        self.captions = words[label] + 0.1 * torch.randn(len(label), CAPTION, generator=g)
        self.captions[:, :4] += 4 * brightness

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.images[i], self.captions[i]


def tower(width_in):
    return nn.Sequential(nn.Linear(width_in, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 24))


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = tower(64), tower(CAPTION)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image, text):
        return F.normalize(self.image(image), dim=1), F.normalize(self.text(text), dim=1), self.logit_scale.exp()


def clip_loss(image, text, scale, rank, world):
    if world > 1:
        all_image, all_text = torch.cat(GatherLayer.apply(image)), torch.cat(GatherLayer.apply(text))
    else:
        all_image, all_text = image, text
    labels = torch.arange(len(image)) + rank * len(image)
    return (F.cross_entropy(scale * image @ all_text.T, labels)
            + F.cross_entropy(scale * text @ all_image.T, labels)) / 2


@torch.no_grad()
def recall(net, data, rank, world):
    """Top-5 recall over the whole test set; each rank asks its share of the questions."""
    image, text, _ = net(data.images, data.captions)
    mine = torch.arange(rank, len(data), world)
    top = (image[mine] @ text.T).topk(5, dim=1).indices
    found = (top == mine[:, None]).any(1).sum()
    if world > 1:
        dist.all_reduce(found)
    return found.item() / len(data)


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    train, test = Pairs(0, 1408), Pairs(1408, 1797)
    sampler = torch.utils.data.DistributedSampler(train, world, rank, shuffle=True, seed=42, drop_last=True)
    loader = torch.utils.data.DataLoader(train, GLOBAL_BATCH // world, sampler=sampler, drop_last=True)
    net = TwoTowers()
    model = DDP(net) if world > 1 else net
    decay = [p for p in net.parameters() if p.ndim > 1]
    plain = [p for p in net.parameters() if p.ndim <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=2e-3)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, EPOCHS * len(loader))

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        meter = torch.zeros(2)
        for image, text in loader:
            loss = clip_loss(*model(image, text), rank, world)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            net.logit_scale.data.clamp_(0, math.log(100))
            meter += torch.tensor([loss.item(), 1.0])
        if world > 1:
            dist.all_reduce(meter)
        found = recall(net, test, rank, world)
        if rank == 0:
            print(f"epoch {epoch}: loss {meter[0] / meter[1]:.6f} scale {net.logit_scale.exp():.5f} recall@5 {found:.4f}")

    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
