"""Contrastive training of an image tower and a text tower on generated pairs."""
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH = 48
EPOCHS = 4
VOCAB, LENGTH, DIM = 50, 12, 32


def pairs(n, seed):
    shared = torch.Generator().manual_seed(70)
    to_image = torch.randn(6, 3 * 8 * 8, generator=shared)
    to_words = torch.randn(6, VOCAB, generator=shared)
    g = torch.Generator().manual_seed(seed)
    concept = torch.randn(n, 6, generator=g)
    images = (concept @ to_image).view(n, 3, 8, 8) / 2.5 + 0.5 * torch.randn(n, 3, 8, 8, generator=g)
    words = torch.multinomial(torch.softmax(concept @ to_words, dim=1), LENGTH, replacement=True, generator=g)
    return TensorDataset(images, words)


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.GELU(), nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.GELU(),
            nn.Flatten(), nn.Linear(32 * 16, DIM),
        )
        self.words = nn.EmbeddingBag(VOCAB, 64, mode="mean")
        self.text = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, DIM))
        self.log_scale = nn.Parameter(torch.tensor(math.log(5.0)))

    def forward(self, images, words):
        a = F.normalize(self.image(images).float(), dim=1)
        b = F.normalize(self.text(self.words(words)).float(), dim=1)
        return a, b, self.log_scale.exp()


def gather(local, rank, world):
    if world == 1:
        return local
    parts = [torch.empty_like(local) for _ in range(world)]
    dist.all_gather(parts, local.detach().contiguous())
    parts[rank] = local
    return torch.cat(parts)


def contrastive(a, b):
    logits = a @ b.t()
    target = torch.arange(len(a), device=a.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


def main():
    rank = int(os.environ.get("RANK", 0))
    world = int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(local_rank % torch.cuda.device_count())
    device = torch.device("cuda", torch.cuda.current_device())
    if world > 1:
        dist.init_process_group("nccl" if torch.cuda.device_count() >= world else "gloo")
    torch.manual_seed(71)

    train = pairs(480, seed=72)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=3)
    loader = DataLoader(train, batch_size=BATCH // world, sampler=sampler, pin_memory=True)
    net = TwoTowers().to(device)
    model = DDP(net, device_ids=[device.index], gradient_as_bucket_view=True) if world > 1 else net
    towers = [p for n, p in net.named_parameters() if n != "log_scale"]
    groups = [{"params": towers}, {"params": [net.log_scale], "lr": 0.01}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, fused=True)

    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        running = torch.zeros((), device=device)
        for images, words in loader:
            images = images.to(device, non_blocking=True)
            words = words.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                a, b, scale = model(images, words)
            loss = contrastive(scale * gather(a, rank, world), gather(b, rank, world))
            optimizer.zero_grad(set_to_none=True)
            (loss * world).backward()
            optimizer.step()
            running += loss.detach()
        if rank == 0:
            print(f"epoch {epoch} loss {running.item() / len(loader):.4f} scale {scale.item():.3f}")

    images, words = (t.to(device) for t in pairs(96, seed=73).tensors)
    with torch.no_grad():
        a, b, _ = net(images, words)
        top1 = (a @ b.t()).argmax(dim=1).eq(torch.arange(96, device=device)).float().mean()
    if rank == 0:
        print(f"retrieval top-1 {top1.item():.4f}")
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
