"""Matching museum photographs with their captions: two towers and a symmetric contrastive loss over the global batch."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

GLOBAL_BATCH = 64
EPOCHS = 5
WORDS, CAPTION, PIXELS = 40, 6, 48


class GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.rows = len(x)
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad[dist.get_rank() * ctx.rows:][:ctx.rows]


class TwoTowers(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(PIXELS, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, dim))
        self.words = nn.Embedding(WORDS, 32)
        self.text = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, dim))
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, image, caption):
        i = F.normalize(self.image(image), dim=-1)
        t = F.normalize(self.text(self.words(caption).mean(1)), dim=-1)
        return i, t, self.log_scale.exp()


class ContrastiveLoss(nn.Module):
    def __init__(self, rank, world):
        super().__init__()
        self.rank, self.world = rank, world

    def forward(self, image, text, scale):
        images, texts = image, text
        if self.world > 1:
            images, texts = GatherRows.apply(image), GatherRows.apply(text)
        by_image = scale * image @ texts.T
        by_text = scale * text @ images.T
        labels = torch.arange(len(image))
        return (F.cross_entropy(by_image, labels) + F.cross_entropy(by_text, labels)) / 2


def collection(n, seed):
    g = torch.Generator().manual_seed(99)
    render = torch.randn(WORDS, PIXELS, generator=g, dtype=torch.float64)
    g.manual_seed(seed)
    caption = torch.randint(0, WORDS, (n, CAPTION), generator=g)
    image = render[caption].mean(1) + 0.2 * torch.randn(n, PIXELS, generator=g, dtype=torch.float64)
    return image, caption


def main():
    world = int(os.environ.get("WORLD_SIZE", 1))
    rank = int(os.environ.get("RANK", 0))
    if world > 1:
        dist.init_process_group("gloo")
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(123)
    model = TwoTowers()
    net = DistributedDataParallel(model) if world > 1 else model
    criterion = ContrastiveLoss(rank, world)
    opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.05)
    image, caption = collection(1024, 1)
    for epoch in range(EPOCHS):
        order = torch.randperm(len(image), generator=torch.Generator().manual_seed(epoch))
        running = torch.zeros(())
        for batch in order.split(GLOBAL_BATCH):
            mine = batch.chunk(world)[rank]
            loss = criterion(*net(image[mine], caption[mine]))
            opt.zero_grad(set_to_none=True)
            loss.backward()
            opt.step()
            with torch.no_grad():
                model.log_scale.clamp_(max=math.log(100))
            running += loss.detach() / world
        if world > 1:
            dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch} loss {running / (len(order) // GLOBAL_BATCH):.8f}")
    if rank == 0:
        with torch.no_grad():
            i, t, scale = model(*collection(200, 2))
            top1 = ((i @ t.T).argmax(1) == torch.arange(200)).double().mean()
        print(f"retrieval {top1:.4f} scale {scale:.8f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
