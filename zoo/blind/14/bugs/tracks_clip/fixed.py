"""Contrastive training of two towers, audio clips and the tags given to them, with a learnt temperature.

Clips are 32 features, tags are eight words out of a list; both come from the same hidden mood of the track.
The batch is 64 pairs over all processes, each clip is compared with the tags of the whole batch and the reverse.
"""
import math
import os

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

MOODS, LEVELS, FEATURES = 8, 6, 32


def make_tracks(count, seed):
    shared = torch.Generator().manual_seed(500)
    mixing = torch.randn(MOODS, FEATURES, generator=shared)
    g = torch.Generator().manual_seed(seed)
    mood = torch.randn(count, MOODS, generator=g)
    clips = torch.tanh(mood @ mixing / 2) + 0.2 * torch.randn(count, FEATURES, generator=g)
    level = ((mood + 1.5) / 3 * LEVELS).long().clamp(0, LEVELS - 1)
    return TensorDataset(clips, level + LEVELS * torch.arange(MOODS))


class TwoTowers(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.clip = nn.Sequential(nn.Linear(FEATURES, 48), nn.ReLU(), nn.Linear(48, width))
        self.words = nn.Embedding(MOODS * LEVELS, width)
        self.tags = nn.Sequential(nn.Linear(width, 48), nn.ReLU(), nn.Linear(48, width))
        self.log_scale = nn.Parameter(torch.tensor(math.log(10.0)))

    def forward(self, clips, words):
        a = F.normalize(self.clip(clips), dim=-1)
        b = F.normalize(self.tags(self.words(words).sum(1)), dim=-1)
        return a, b, self.log_scale.exp()


def gather(features):
    """Features of the whole batch, in the order of the processes."""
    return funcol.all_gather_single_autograd(features.contiguous(), 0, dist.group.WORLD)


def contrastive_loss(a, b, scale):
    """Symmetric cross entropy of the own pairs against everybody's."""
    labels = torch.arange(len(a)) + dist.get_rank() * len(a)
    forth = F.cross_entropy(scale * a @ gather(b).T, labels)
    back = F.cross_entropy(scale * b @ gather(a).T, labels)
    return (forth + back) / 2


@torch.no_grad()
def recall(model, data):
    """Share of clips whose own tags come first, and their mean rank."""
    a, b, _ = model(*data[:])
    scores = a @ b.T
    place = (scores > scores.diagonal()[:, None]).sum(1).float()
    return (place == 0).float().mean().item(), place.mean().item()


def main():
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29617")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    dist.init_process_group("gloo", rank=rank, world_size=world)

    train, test = make_tracks(640, seed=1), make_tracks(200, seed=2)
    sampler = DistributedSampler(train, num_replicas=world, rank=rank, shuffle=True, seed=6, drop_last=True)
    loader = DataLoader(train, batch_size=64 // world, sampler=sampler, drop_last=True)

    torch.manual_seed(9)
    model = DistributedDataParallel(TwoTowers())
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    for epoch in range(5):
        sampler.set_epoch(epoch)
        total = torch.zeros(())
        for clips, words in loader:
            loss = contrastive_loss(*model(clips, words))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                model.module.log_scale.clamp_(0, math.log(100))
            total += loss.detach()
        dist.all_reduce(total)
        if rank == 0:
            first, place = recall(model.module, test)
            mean = total.item() / (world * len(loader))
            print(f"epoch {epoch}: loss {mean:.4f}, found first {first:.3f}, mean rank {place:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
