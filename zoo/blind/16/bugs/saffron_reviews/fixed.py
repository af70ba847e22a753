"""Adapting a frozen review classifier to a new shop with low rank adapters, in bfloat16, warm-up and cosine decay."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

GLOBAL_BATCH, EPOCHS, WORDS = 64, 4, 60


class LoRALinear(nn.Module):
    def __init__(self, base, rank=4, alpha=8.0):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x):
        return self.base(x) + self.scale * F.linear(F.linear(x, self.a), self.b)


class ReviewNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, 32, mode="mean").requires_grad_(False)
        self.one = nn.Linear(32, 64)
        self.two = nn.Linear(64, 64)
        self.out = nn.Linear(64, 3)

    def forward(self, words):
        x = 4 * self.bag(words)
        return self.out(F.relu(self.two(F.relu(self.one(x)))))


def adapt(net):
    for name in ("one", "two", "out"):
        setattr(net, name, LoRALinear(getattr(net, name)))
    return net


def reviews(n, seed):
    g = torch.Generator().manual_seed(seed)
    stars = torch.randint(0, 3, (n,), generator=g)
    words = torch.randint(0, WORDS, (n, 12), generator=g)
    telling = torch.rand(n, 12, generator=g) < 0.3
    words = torch.where(telling, stars[:, None] * 20 + words % 20, words)
    return TensorDataset(words, stars)


def warmup_cosine(opt, total, warmup):
    def factor(step):
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / (total - warmup))))
    return torch.optim.lr_scheduler.LambdaLR(opt, factor)


def main():
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if world > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = adapt(ReviewNet())
    model = DDP(net) if world > 1 else net
    train_set = reviews(1024, 1)
    micro_batch = GLOBAL_BATCH // world
    sampler = DistributedSampler(train_set, world, rank, shuffle=True, seed=3, drop_last=True)
    loader = DataLoader(train_set, batch_size=micro_batch, sampler=sampler, drop_last=True)
    total_steps = EPOCHS * len(loader)
    opt = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr=1e-2)
    schedule = warmup_cosine(opt, total_steps, total_steps // 8)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        running = torch.zeros(())
        for words, stars in loader:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                logits = model(words)
            loss = F.cross_entropy(logits.float(), stars)
            opt.zero_grad()
            loss.backward()
            opt.step()
            schedule.step()
            running += loss.detach() / len(loader) / world
        if world > 1:
            dist.all_reduce(running)
        if rank == 0:
            print(f"epoch {epoch} loss {running:.3f} lr {opt.param_groups[0]['lr']:.2e}")
    if rank == 0:
        words, stars = reviews(512, 2).tensors
        with torch.no_grad():
            logits = net(words)
        print(f"new reviews {F.cross_entropy(logits, stars):.3f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
