import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


def parse_args():
    p = argparse.ArgumentParser()
    p.add_argument("--batch-size", type=int, default=48, help="global")
    p.add_argument("--epochs", type=int, default=4)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--warmup", type=int, default=8)
    p.add_argument("--wd", type=float, default=0.1)
    return p.parse_args()


class GatherLayer(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return tuple(out)

    @staticmethod
    def backward(ctx, *grads):
        stacked = torch.stack(grads)
        dist.all_reduce(stacked)
        return stacked[dist.get_rank()]


class Captions(Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        world = torch.Generator().manual_seed(99)
        words, look = torch.randn(40, 8, generator=world), torch.randn(8, 36, generator=world)
        self.text = torch.randint(0, 40, (n, 5), generator=g)
        scene = words[self.text].mean(1)
        self.image = (scene @ look + 0.3 * torch.randn(n, 36, generator=g)).view(n, 1, 6, 6)

    def __len__(self):
        return len(self.text)

    def __getitem__(self, i):
        return self.image[i], self.text[i]


class CLIP(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.visual = nn.Sequential(nn.Conv2d(1, 16, 3), nn.GELU(), nn.Flatten(), nn.Linear(256, 64), nn.GELU(), nn.Linear(64, dim))
        self.token_embedding = nn.Embedding(40, 32)
        self.text_projection = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, dim))
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, image, text):
        image_features = F.normalize(self.visual(image), dim=-1)
        text_features = F.normalize(self.text_projection(self.token_embedding(text).mean(1)), dim=-1)
        return image_features, text_features, self.logit_scale.exp()


class ClipLoss(nn.Module):
    def __init__(self, rank, world_size):
        super().__init__()
        self.rank, self.world_size = rank, world_size

    def forward(self, image_features, text_features, logit_scale):
        if self.world_size > 1:
            all_image = torch.cat(GatherLayer.apply(image_features))
            all_text = torch.cat(GatherLayer.apply(text_features))
        else:
            all_image, all_text = image_features, text_features
        logits_per_image = logit_scale * image_features @ all_text.T
        logits_per_text = logit_scale * text_features @ all_image.T
        n = image_features.size(0)
        labels = torch.arange(n) + n * self.rank
        return (F.cross_entropy(logits_per_image, labels) + F.cross_entropy(logits_per_text, labels)) / 2


def cosine_lr(optimizer, base_lr, warmup, steps):
    def adjust(step):
        lr = base_lr * (step + 1) / warmup if step < warmup else \
            0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup))) * base_lr
        for group in optimizer.param_groups:
            group["lr"] = lr
    return adjust


@torch.no_grad()
def evaluate(model, data, rank, world):
    model.eval()
    mine = torch.arange(rank, len(data), world)
    image, text, scale = model(data.image[mine], data.text[mine])
    packed = torch.zeros(len(data), image.size(1) * 2)
    packed[mine] = torch.cat([image, text], dim=1)
    if world > 1:
        dist.all_reduce(packed)
    image, text = packed.chunk(2, dim=1)
    logits, truth = scale * image @ text.T, torch.arange(len(data))
    place = (logits > logits.diagonal()[:, None]).sum(1)
    return F.cross_entropy(logits, truth).item(), (place == 0).double().mean().item(), (place < 5).double().mean().item()


def main():
    args = parse_args()
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = CLIP()
    net = DistributedDataParallel(model) if world > 1 else model
    params = list(model.parameters())
    optimizer = torch.optim.AdamW([{"params": [p for p in params if p.ndim < 2], "weight_decay": 0.0},
                                   {"params": [p for p in params if p.ndim >= 2], "weight_decay": args.wd}],
                                  lr=args.lr, betas=(0.9, 0.98), eps=1e-6)
    train, val = Captions(576, 1), Captions(110, 2)
    sampler = DistributedSampler(train, world, rank, seed=0)
    loader = DataLoader(train, args.batch_size // world, sampler=sampler, drop_last=True)
    scheduler = cosine_lr(optimizer, args.lr, args.warmup, len(loader) * args.epochs)
    loss_fn = ClipLoss(rank, world)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        net.train()
        running = torch.zeros(())
        for i, (images, texts) in enumerate(loader):
            scheduler(epoch * len(loader) + i)
            optimizer.zero_grad()
            loss = loss_fn(*net(images, texts))
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, math.log(20))
            running += loss.detach()
        if world > 1:
            dist.all_reduce(running)
        val_loss, r1, r5 = evaluate(model, val, rank, world)
        if rank == 0:
            print(f"epoch {epoch} loss {running.item() / world / len(loader):.5f} scale {model.logit_scale.exp().item():.4f} "
                  f"val {val_loss:.5f} R@1 {r1:.4f} R@5 {r5:.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
